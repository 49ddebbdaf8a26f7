# SPDX-License-Identifier: Apache-2.0
"""How the BPF programs reach the frames of Ruby and PHP, which are a chain in memory."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from sonde.errors import SondeError

RUNTIME: Final = 3
"""RUNTIME_CHAIN of abi/unwind.h."""
CHAIN_FRAME: Final = 3
"""Bits of a stack's first word: a frame of Ruby or PHP (abi/unwind.h)."""
CHAIN_NATIVE: Final = 4
"""Bit of that word: the frame of a C function."""
ABSENT: Final = 0xFFFF
"""Offset of a field that an interpreter does not have."""
_ADDRESS: Final = (1 << 64) - 1
# struct unwind_chain of abi/unwind.h
_KERNEL: Final = struct.Struct("<5Q16H")


class UnsupportedEngineError(SondeError):
    """A Ruby or PHP whose frames cannot be walked: of an unknown version, or built in another way.

    Of the process its text has only the version that the file claims.
    """


class Access(IntEnum):
    """What an engine's `root` is (native/unwind/src/engines.rs has what each means)."""

    NONE = 0
    ADDRESS = 1
    THREAD = 2
    MODULE = 3
    SLOT = 4


class RootKind(IntEnum):
    """enum unwind_root of abi/unwind.h."""

    AT_ADDRESS = 0
    OF_THREAD = 1
    OF_MODULE = 2


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """What the native `find_engine` read from a file. Addresses as linked."""

    language: str
    """ruby | php"""
    version: str
    """As the file claims it."""
    access: int
    """An `Access`."""
    root: int
    evaluation: tuple[int, int, int, int]
    """(start, end) of the evaluation loop, and of its cold part; 0 without one."""
    variables: tuple[int, int]
    """(start, end) of the variables that have a value in the file; 0: not looked for."""


@dataclass(frozen=True, slots=True)
class Root:
    """Where a pointer to the newest frame of a thread is found in one process."""

    kind: RootKind
    value: int
    """Address, or offset from the thread's base, or from the module's variables of a thread."""
    module: int = 0
    """Number of the ELF module in the thread's table of thread-local storage."""


Rule = tuple[int, int, int, int]
"""(cfa, rbp, offset, offset of rbp) of a `struct unwind_rule`."""
CFA_RSP: Final = 2
CFA_LOOP: Final = 15
"""Of abi/unwind.h, `enum unwind_cfa`."""
_RULE: Final = struct.Struct("<BBHiii")


def rule_of(raw: bytes) -> Rule:
    """The rule of `struct unwind_rule`."""
    cfa, rbp, _, offset, rbp_offset, _ = _RULE.unpack(raw)
    return cfa, rbp, offset, rbp_offset


@dataclass(frozen=True, slots=True)
class ChainLayout:
    """Offsets by which frames are walked, in bytes, multiples of 8; but `newest` in a frame."""

    newest: int
    """Of the newest frame, in what the root points to; ABSENT: the root points to the frame."""
    frame_bytes: int
    """Size of a frame."""
    function: int
    """Pointer to the function."""
    place: int
    """Pointer to the instruction that runs, or to the one behind it."""
    previous: int
    """Pointer to the calling frame; ABSENT: it lies behind this one."""
    flags: int
    flags_are_behind: bool
    """At `flags` is a pointer to them."""
    last: int
    """Number of a bit of the flags: the evaluation loop was entered with this frame."""
    native: int
    """Of a frame without a function: how many bytes before its flags the description of the C
    function is; ABSENT: there is none."""
    place_register: int
    """DWARF's number of the register that has `place` while the loop itself runs; ABSENT: none."""
    is_bounded: bool
    """Before the pointer to the newest frame are the address of the frames' memory and its length
    in words."""
    dummy: int
    """What the upper half of the flags is, without its sign bit, in the dummy that ends a chain; 0:
    there is no dummy."""

    def for_kernel(
        self, root: Root, evaluation: tuple[int, int, int, int], bias: int, is_musl: bool
    ) -> bytes:
        """`struct unwind_chain` of a process in which the engine's file is loaded at `bias`."""
        return _KERNEL.pack(
            root.value & _ADDRESS,
            *(address + bias & _ADDRESS if address else 0 for address in evaluation),
            *(root.kind, root.module, 8 if is_musl else 16, self.newest, self.frame_bytes),
            *(self.function, self.place, self.previous, self.flags, int(self.flags_are_behind)),
            *(self.last, self.native, self.place_register, self.dummy, int(self.is_bounded), 0),
        )
