# SPDX-License-Identifier: Apache-2.0
"""A trace of all that a process asked of its devices: every kernel, copy, set and call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Kind(IntEnum):
    """What a row is of; numbers of `enum inject_traced_kind`."""

    KERNEL = 1
    COPY = 2
    SET = 3
    RUNTIME = 4
    """A call of CUDA's runtime API."""
    DRIVER = 5
    """A call of CUDA's driver API."""


DEVICE_KINDS = (Kind.KERNEL, Kind.COPY, Kind.SET)
CALL_KINDS = (Kind.RUNTIME, Kind.DRIVER)


@dataclass(frozen=True, slots=True)
class RawTrace:
    """A trace as the process wrote it: a copy, of which only the size was checked."""

    head: Mapping[str, int]
    """The fields of `struct inject_trace`."""
    records: bytes
    record_bytes: int
    """The size of each of them."""
    fields: Mapping[str, tuple[int, str]]
    """Of a record: offset, and type as in the module `struct`."""
    names: Mapping[int, str]
    """Of kernels and calls, by the number that records have."""


@dataclass(frozen=True, slots=True)
class DeviceTrace:
    """Checked rows of one trace."""

    pid: int
    start_ns: int
    """CLOCK_MONOTONIC; begin of the trace."""
    end_ns: int
    wall_offset_ns: int
    """Added to a time of the trace it gives nanoseconds since 1970."""
    rows: NDArray[Any]
    """Structured, ordered by start: `start_ns`, `end_ns` (CLOCK_MONOTONIC), `node` (of a graph),
    `bytes`, `correlation`, `name`, `device`, `stream`, `graph` (0 none), `tid` (as this machine
    numbers it), `result` (of a call), `kind` (`Kind`), `direction`, `memory`, `grid_0` …
    `block_2`, `registers`, `shared_bytes`."""
    names: Mapping[int, str]
    """By `rows["name"]`; kernels demangled."""
    is_cut: bool
    """It ended before its time: another profiler came, or the trace was called off."""
    lost: Mapping[str, int]
    """How many rows are missing, by the reason."""
    clock_error_ns: int = 0
    """By how much the device's clock and the host's drifted apart during the trace; 0 also where
    that is not known, as they count other units."""

    def of(self, *kinds: Kind) -> NDArray[Any]:
        """The rows of these kinds."""
        kind = self.rows["kind"]
        chosen: NDArray[np.bool_] = kind == kinds[0]
        for other in kinds[1:]:
            chosen = chosen | (kind == other)
        return self.rows[chosen]

    def count(self, *kinds: Kind) -> int:
        """How many rows of these kinds there are."""
        return len(self.of(*kinds))
