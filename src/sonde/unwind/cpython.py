# SPDX-License-Identifier: Apache-2.0
"""Layouts of CPython's frames and code objects, by version.

Up to 3.12 they come from the headers of each minor version (Include/internal/pycore_frame.h,
Include/cpython/code.h, Include/cpython/pystate.h), which keep them stable for extension modules.
From 3.13 on the interpreter publishes them (`_Py_DebugOffsets`, the first field of _PyRuntime).
All offsets in bytes, for 64-bit little-endian builds.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Final

from sonde.errors import SondeError

RUNTIME: Final = 1
"""RUNTIME_PYTHON of abi/unwind.h."""
ABSENT: Final = 0xFFFF
"""Offset of a field that this version does not have."""
OLDEST: Final = (3, 10)
NEWEST: Final = (3, 14)
_KEPT_INTERPRETERS: Final = 64
_ADDRESS: Final = (1 << 64) - 1
_MAX_OFFSET: Final = 4096
_MAX_STATE_OFFSET: Final = 1 << 20
_COOKIE: Final = b"xdebugpy"
"""The first bytes of _Py_DebugOffsets."""
_NAMED: Final = re.compile(r"python(3)\.(\d{1,3})")
# struct unwind_python of abi/unwind.h
_KERNEL: Final = struct.Struct("<5Q16H")
_GLIBC_TSD: Final = (0x318, 16, ABSENT)
"""tsd, tsd_stride and tsd_deref of `struct unwind_python`. struct pthread: `specific_1stblock` at
0x310 of {seq, data} (nptl/descr.h)."""
_MUSL_TSD: Final = (0, 8, 0x80)
"""The same: `void **tsd` at 0x80 (src/internal/pthread_impl.h)."""


class UnsupportedPythonError(SondeError):
    """A CPython whose frames cannot be unwound: too old, too new, or free-threaded."""


@dataclass(frozen=True, slots=True)
class FoundInterpreter:
    """What the native `find_cpython` read from an interpreter's file. Addresses as linked."""

    version: int
    """`Py_Version`, 0xMMmmppRR; 0 where the file has none."""
    runtime: int
    """Address of _PyRuntime."""
    thread_key: int
    """Address of the key of thread-local storage for thread states; 0 where it was not found."""
    evaluation: tuple[int, int, int, int]
    """(start, end) of the evaluation loop, and of its cold part; 0 without one."""
    runtime_bytes: bytes
    """First bytes of _PyRuntime."""


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """Offsets of the fields that link frames."""

    of_thread: int
    """In the thread state: the current frame, or the cframe that leads to it."""
    of_cframe: int
    """In the cframe: the current frame."""
    previous: int
    """In a frame, as are all below: the calling frame."""
    code: int
    """Code object."""
    instruction: int
    """Last instruction."""
    instruction_is_index: bool = False
    """`instruction` is an index of instructions (3.10), not an address."""
    entry: int = ABSENT
    """Flag of the first frame of an evaluation loop (3.11)."""
    owner: int = ABSENT
    """Owner of the frame (3.12 on)."""
    owner_entry: int = 0
    """Value of `owner` at the first frame of an evaluation loop."""


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """Offsets in a code object of what names it."""

    filename: int
    qualname: int
    linetable: int
    first_line: int
    instructions: int
    """Of the first instruction; 0: instructions are a separate object (3.10)."""


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Offsets that lead from the runtime to the modules of the main interpreter."""

    main: int
    """In _PyRuntime: pointer to the main interpreter's state."""
    modules: int
    """In an interpreter's state: sys.modules."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """One build of CPython. Addresses as linked."""

    version: tuple[int, int]
    """(major, minor)"""
    thread_key: int
    """As in `FoundInterpreter`."""
    evaluation: tuple[int, int, int, int]
    """As in `FoundInterpreter`."""
    frames: FrameLayout
    code: CodeLayout
    runtime: int
    """As in `FoundInterpreter`."""
    state: StateLayout

    def for_kernel(self, bias: int, is_musl: bool) -> bytes:
        """`struct unwind_python` of a process in which its file is loaded at `bias`."""
        frames = self.frames
        tsd, stride, deref = _MUSL_TSD if is_musl else _GLIBC_TSD
        return _KERNEL.pack(
            self.thread_key + bias & _ADDRESS,
            *(address + bias & _ADDRESS if address else 0 for address in self.evaluation),
            *(tsd, stride, deref),
            *(frames.of_thread, frames.of_cframe, frames.previous, frames.code),
            *(frames.instruction, int(frames.instruction_is_index)),
            *(frames.entry, frames.owner, frames.owner_entry, self.code.first_line),
            *(0, 0, 0),
        )


_FRAMES: Final = {
    10: FrameLayout(24, ABSENT, 24, 32, 96, instruction_is_index=True),
    11: FrameLayout(56, 8, 48, 32, 56, entry=68),
    12: FrameLayout(56, 0, 8, 0, 56, owner=70, owner_entry=3),
}
_CODE: Final = {
    10: CodeLayout(104, 112, 120, 40, 0),
    11: CodeLayout(112, 128, 136, 72, 184),
    12: CodeLayout(112, 128, 136, 68, 192),
}
# pycore_runtime.h (interpreters.main), pycore_interp.h (modules, imports.modules).
_STATE: Final = {
    10: StateLayout(40, 856),
    11: StateLayout(48, 888),
    12: StateLayout(48, 944),
}
# After the cookie come numbers of 8 bytes: version, free_threaded, then the structs one after the
# other (pycore_runtime.h of 3.13, pycore_debug_offsets.h of 3.14). Here: fields of two structs.
_INTERPRETER_FIELDS: Final = {13: 13, 14: 16}
_MODULES_FIELD: Final = {13: 5, 14: 6}
_FRAME_FIELDS: Final = {13: 6, 14: 8}
_OWNED_BY_LOOP: Final = 3
"""FRAME_OWNED_BY_CSTACK of 3.12 and 3.13, FRAME_OWNED_BY_INTERPRETER of 3.14."""


def interpreter(found: FoundInterpreter, file_name: str) -> Interpreter:
    """The layouts of an interpreter. `file_name`, as the process that runs it has the file, names
    the version where the file itself does not (3.10). Raises UnsupportedPythonError."""
    return _interpreter(found, _version(found, file_name))


@lru_cache(_KEPT_INTERPRETERS)
def _interpreter(found: FoundInterpreter, version: tuple[int, int]) -> Interpreter:
    if not OLDEST <= version <= NEWEST:
        raise UnsupportedPythonError(f"no layout of CPython {version[0]}.{version[1]} is known")
    if not found.thread_key:
        raise UnsupportedPythonError(
            "the key of the thread states was not found in this build of CPython"
        )
    minor = version[1]
    if minor in _FRAMES:
        frames, code, state = _FRAMES[minor], _CODE[minor], _STATE[minor]
    else:
        frames, code, state = _published(found.runtime_bytes, minor)
    key, evaluation = found.thread_key, found.evaluation
    return Interpreter(version, key, evaluation, frames, code, found.runtime, state)


def _version(found: FoundInterpreter, file_name: str) -> tuple[int, int]:
    if found.version:
        return (found.version >> 24) & 0xFF, (found.version >> 16) & 0xFF
    if found.runtime_bytes.startswith(_COOKIE):
        (version,) = struct.unpack_from("<Q", found.runtime_bytes, 8)
        return version >> 24 & 0xFF, version >> 16 & 0xFF
    named = _NAMED.search(file_name)
    return (int(named[1]), int(named[2])) if named else (0, 0)


def _published(raw: bytes, minor: int) -> tuple[FrameLayout, CodeLayout, StateLayout]:
    if not raw.startswith(_COOKIE) or len(raw) < 8 * 80:
        raise UnsupportedPythonError("this build of CPython publishes no offsets")
    numbers = struct.unpack_from("<80Q", raw)
    if numbers[2]:
        raise UnsupportedPythonError("a free-threaded build of CPython")
    thread = 3 + 3 + _INTERPRETER_FIELDS[minor]
    frame = thread + 9
    code = frame + _FRAME_FIELDS[minor]
    frames = FrameLayout(
        of_thread=numbers[thread + 4],
        of_cframe=ABSENT,
        previous=numbers[frame + 1],
        code=numbers[frame + 2],
        instruction=numbers[frame + 3],
        owner=numbers[frame + 5],
        owner_entry=_OWNED_BY_LOOP,
    )
    names = CodeLayout(
        filename=numbers[code + 1],
        qualname=numbers[code + 3],
        linetable=numbers[code + 4],
        first_line=numbers[code + 5],
        instructions=numbers[code + 9],
    )
    # The main interpreter follows the newest one in `struct pyinterpreters` (pycore_interp.h).
    state = StateLayout(numbers[3 + 2] + 8, numbers[3 + 3 + _MODULES_FIELD[minor]])
    # 104: of a frame the BPF programs read PYTHON_FRAME_BYTES (bpf/unwind_state.h).
    small = (frames.previous, frames.code, frames.instruction, frames.owner)
    others = (frames.of_thread, *(getattr(names, it.name) for it in fields(names)))
    if max(small) > 104 or max(others) > _MAX_OFFSET:
        raise UnsupportedPythonError("this build of CPython publishes implausible offsets")
    if state.main > _MAX_STATE_OFFSET or state.modules > _MAX_STATE_OFFSET:
        state = StateLayout(0, 0)  # its threads have the kernel's names
    return frames, names, state
