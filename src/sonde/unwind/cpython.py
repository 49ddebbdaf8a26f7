# SPDX-License-Identifier: Apache-2.0
"""Layouts of CPython's frames and code objects, by version.

Up to 3.12 they are those of the headers of each minor version (Include/internal/pycore_frame.h,
Include/cpython/code.h, Include/cpython/pystate.h; fixed within it for extension modules' sake).
From 3.13 on the interpreter publishes its own (`_Py_DebugOffsets`, the first thing in _PyRuntime).
All offsets in bytes, for 64-bit little-endian builds.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, fields
from typing import Final

from sonde.errors import SondeError

ABSENT: Final = 0xFFFF
OLDEST: Final = (3, 10)
NEWEST: Final = (3, 14)
_ADDRESS: Final = (1 << 64) - 1
_MOST_OFFSET: Final = 4096
_COOKIE: Final = b"xdebugpy"
_NAMED: Final = re.compile(r"python(3)\.(\d+)(t?)")
# struct unwind_python of abi/unwind.h
_KERNEL: Final = struct.Struct("<5Q16H")
_GLIBC_TSD: Final = (0x318, 16, ABSENT)
"""struct pthread: `specific_1stblock` at 0x310 of {seq, data} (nptl/descr.h)."""
_MUSL_TSD: Final = (0, 8, 0x80)
"""struct pthread: `void **tsd` at 0x80 (src/internal/pthread_impl.h)."""


class UnsupportedPythonError(SondeError):
    """A CPython that we cannot walk: too old, too new, or free-threaded."""


@dataclass(frozen=True, slots=True)
class Found:
    """What an interpreter's file told (native `find_cpython`)."""

    version: int
    runtime: int
    thread_key: int
    evaluation: tuple[int, int, int, int]
    runtime_bytes: bytes


@dataclass(frozen=True, slots=True)
class Frames:
    """How frames hang together."""

    of_thread: int
    of_cframe: int
    previous: int
    code: int
    instruction: int
    instruction_is_index: bool = False
    entry: int = ABSENT
    owner: int = ABSENT
    owner_entry: int = 0


@dataclass(frozen=True, slots=True)
class Code:
    """Where a code object keeps what names it."""

    filename: int
    qualname: int
    linetable: int
    first_line: int
    instructions: int
    """Of the first instruction; 0: they are not inside (3.10)."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """One build of CPython."""

    version: tuple[int, int]
    thread_key: int
    evaluation: tuple[int, int, int, int]
    frames: Frames
    code: Code

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
    10: Frames(24, ABSENT, 24, 32, 96, instruction_is_index=True),
    11: Frames(56, 8, 48, 32, 56, entry=68),
    12: Frames(56, 0, 8, 0, 56, owner=70, owner_entry=3),
}
_CODE: Final = {
    10: Code(104, 112, 120, 40, 0),
    11: Code(112, 128, 136, 72, 184),
    12: Code(112, 128, 136, 68, 192),
}
# Numbers of 8 bytes after the cookie: version, free_threaded, then one struct after the other
# (pycore_runtime.h of 3.13, pycore_debug_offsets.h of 3.14), of which we need a few.
_INTERPRETER_FIELDS: Final = {13: 13, 14: 16}
_FRAME_FIELDS: Final = {13: 6, 14: 8}
_OWNED_BY_THE_LOOP: Final = 3
"""FRAME_OWNED_BY_CSTACK of 3.12 and 3.13, FRAME_OWNED_BY_INTERPRETER of 3.14."""


def interpreter(found: Found, file_name: str) -> Interpreter:
    """The layouts of an interpreter. Raises UnsupportedPythonError."""
    version, is_threaded = _version(found, file_name)
    if not OLDEST <= version <= NEWEST:
        raise UnsupportedPythonError(f"no layout of CPython {version[0]}.{version[1]} is known")
    if is_threaded:
        raise UnsupportedPythonError("a free-threaded build of CPython")
    if not found.thread_key:
        raise UnsupportedPythonError(
            "where this build of CPython keeps its thread states is not seen"
        )
    minor = version[1]
    if minor in _FRAMES:
        frames, code = _FRAMES[minor], _CODE[minor]
    else:
        frames, code = _published(found.runtime_bytes, minor)
    return Interpreter(version, found.thread_key, found.evaluation, frames, code)


def _version(found: Found, file_name: str) -> tuple[tuple[int, int], bool]:
    named = _NAMED.search(file_name)
    is_threaded = bool(named and named[3])
    if found.version:
        return ((found.version >> 24) & 0xFF, (found.version >> 16) & 0xFF), is_threaded
    if found.runtime_bytes.startswith(_COOKIE):
        (version,) = struct.unpack_from("<Q", found.runtime_bytes, 8)
        return (version >> 24 & 0xFF, version >> 16 & 0xFF), is_threaded
    return ((int(named[1]), int(named[2])) if named else (0, 0)), is_threaded


def _published(raw: bytes, minor: int) -> tuple[Frames, Code]:
    if not raw.startswith(_COOKIE) or len(raw) < 8 * 80:
        raise UnsupportedPythonError("this build of CPython publishes no offsets")
    words = struct.unpack_from("<80Q", raw)
    if words[2]:
        raise UnsupportedPythonError("a free-threaded build of CPython")
    thread = 3 + 3 + _INTERPRETER_FIELDS[minor]
    frame = thread + 9
    code = frame + _FRAME_FIELDS[minor]
    frames = Frames(
        of_thread=words[thread + 4],
        of_cframe=ABSENT,
        previous=words[frame + 1],
        code=words[frame + 2],
        instruction=words[frame + 3],
        owner=words[frame + 5],
        owner_entry=_OWNED_BY_THE_LOOP,
    )
    names = Code(
        filename=words[code + 1],
        qualname=words[code + 3],
        linetable=words[code + 4],
        first_line=words[code + 5],
        instructions=words[code + 9],
    )
    small = (frames.previous, frames.code, frames.instruction, frames.owner)
    others = (frames.of_thread, *(getattr(names, it.name) for it in fields(names)))
    if max(small) > 104 or max(others) > _MOST_OFFSET:
        raise UnsupportedPythonError("this build of CPython publishes offsets that make no sense")
    return frames, names
