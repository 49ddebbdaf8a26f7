# SPDX-License-Identifier: Apache-2.0
"""What is known of a device API and of each of its calls."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

OPS = (
    *("alloc", "free", "pin", "unpin", "map", "unmap", "copy", "set", "prefetch"),
    *("sync", "flush", "build", "graph-launch", "launch"),
)
"""What a call does. Launches are probed on request only, as there are so very many of them."""

DIRECTIONS = ("", "h2d", "d2h", "d2d", "h2h", "p2p", "unknown")

RESULTS = ("status", "handle", "none")
"""`enum call_result` of abi/events.h."""

_SPEC = struct.Struct("=3bbHBBIIbBbb2HH2x")
"""`struct call_spec` of abi/events.h."""

_NONE = -1


@dataclass(frozen=True, slots=True)
class Reading:
    """How the kernel side reads one call: `struct call_spec` of abi/events.h, which has what the
    fields are.

    Arguments are numbered in integer words, registers first, then the stack.
    """

    size_args: tuple[int, ...] = ()
    vector_arg: int = _NONE
    vector_at: int = 0
    vector_len: int = 0
    scale: int = 0
    """0: the call has no size."""
    direction_arg: int = _NONE
    direction_at: tuple[int, ...] = ()
    direction_mask: int = 0xFFFFFFFF
    blocking_arg: int = _NONE
    status_arg: int = _NONE
    result: str = "status"

    def packed(self, at_entry: int = 0) -> bytes:
        """The bytes of the struct. `at_entry`: the function's number where its return is not seen,
        the same in every file."""
        sizes = (*self.size_args, _NONE, _NONE, _NONE)[:3]
        ends = (*self.direction_at, 0, 0)[:2]
        return _SPEC.pack(
            *sizes,
            self.vector_arg,
            self.vector_at,
            self.vector_len,
            RESULTS.index(self.result),
            self.scale,
            self.direction_mask,
            self.direction_arg,
            len(self.direction_at),
            self.blocking_arg,
            self.status_arg,
            *ends,
            at_entry,
        )


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an API."""

    api: str
    function: str
    """Its name without version suffixes."""
    symbols: tuple[str, ...]
    """The symbols it is exported under."""
    op: str
    reading: Reading
    direction: str
    """Fixed direction, where `directions` is empty."""
    directions: Mapping[int, str]
    """Direction by the API's number for it."""
    blocking: bool
    """It waits until the work is done, whatever its arguments."""
    arguments: tuple[str, ...]
    """Names as in the header; empty where none is read."""
    calls_back: bool = False
    """It may call functions of its caller before it returns. A probe at the return would end a
    program whose function throws an exception: so calls are counted at the entry, without time
    and status."""

    def direction_of(self, number: int) -> str:
        """The direction of one call by the number read from it."""
        return self.directions.get(number, "unknown") if self.directions else self.direction


@dataclass(frozen=True, slots=True)
class Api:
    """One device API."""

    name: str
    libraries: tuple[str, ...]
    """Patterns of file names. Other files are searched too: the API may be linked in."""
    hands_out: bool
    """The library has a function (cuGetProcAddress) that hands out functions no symbol names."""
    verified: bool
    """Whether what is read of these calls was checked on a real device."""
    calls: tuple[Call, ...]

    def is_library(self, file_name: str) -> bool:
        """Whether a file of this name is expected to carry the API."""
        return any(fnmatchcase(file_name, pattern) for pattern in self.libraries)
