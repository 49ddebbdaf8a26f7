# SPDX-License-Identifier: Apache-2.0
"""Names of Python frames, read out of the memory of the process that runs them.

The kernel brings back the address of a code object, its first line and an instruction. Names and
lines are read here once for each code object. Memory of a code object that is gone is used again,
so what is known of one holds only as long as its head still reads the same, and counts for a
sample only where the first line is the one that the kernel saw.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from sys import intern
from typing import Final

from sonde import _native, procfs
from sonde.model.code import Frame, KnownFrame
from sonde.resolve.lru_cache import LruCache
from sonde.resolve.resolver import frame_id
from sonde.resolve.tracked_process import TrackedProcess
from sonde.unwind.cpython import Code, Interpreter
from sonde.unwind.python_lines import line_at

PYTHON_FRAME: Final = 1 << 63
MAX_CODE: Final = 32_768
MAX_TEXT: Final = 512
MAX_LINE: Final = 1 << 31
MAX_LINES_BYTES: Final = 1 << 18
"""Of one line table; instructions beyond it have the last line before."""
HELD_LINES_BYTES: Final = 8 << 20
"""Of all line tables. Those that go are read again when an instruction is new."""
MAX_FRAMES: Final = 65_536
MAX_PLACES: Final = 16_384
"""Of processes, so that their walks are named at once; more than that are looked up anew."""
TRUST_NS: Final = 200_000_000
"""How long what was read is believed without looking again."""
_ASCII, _UNICODE_3_10, _UNICODE_3_12 = 40, (48, 72), (40, 56)
_UNKNOWN: Final = Frame("python", "", "[python]")
_numbers = count(1)
_UNREAD: Final = KnownFrame(frame_id(_UNKNOWN), _UNKNOWN)
NO_FRAME: Final = KnownFrame(0, _UNKNOWN)
"""In place of a frame that is no code of anybody."""
_INSTALLED: Final = ("/site-packages/", "/dist-packages/")


@dataclass(slots=True)
class _CodeObject:
    head: bytes
    function: str
    file: str
    first_line: int
    lines: bytes | None
    """None: it made room for others."""
    checked_ns: int
    number: int = field(default_factory=lambda: next(_numbers))


class _HeldLines:
    """Lets go of line tables, the oldest ones together, before there are too many bytes of them."""

    def __init__(self, limit_bytes: int) -> None:
        self._half_bytes = limit_bytes // 2
        self._old: list[_CodeObject] = []
        self._young: list[_CodeObject] = []
        self._young_bytes = 0

    def hold(self, code: _CodeObject, lines: bytes) -> None:
        """Keep them with their code object for a while."""
        if self._young_bytes + sys.getsizeof(lines) > self._half_bytes:
            for it in self._old:
                it.lines = None
            self._old, self._young, self._young_bytes = self._young, [], 0
        code.lines = lines
        self._young.append(code)
        self._young_bytes += sys.getsizeof(lines)

    @property
    def bytes(self) -> int:
        """Held now."""
        held = (it.lines for it in (*self._old, *self._young))
        return sum(sys.getsizeof(lines) for lines in held if lines is not None)


class PythonCode:
    """Code objects of all processes."""

    def __init__(self, lines_bytes: int = HELD_LINES_BYTES) -> None:
        self._known: LruCache[tuple[int, int, int], _CodeObject] = LruCache(MAX_CODE)
        self._frames: LruCache[tuple[int, int], KnownFrame] = LruCache(MAX_FRAMES)
        """By number of the code object and place of the instruction."""
        self._held = _HeldLines(lines_bytes)
        self._places: dict[tuple[int, int], _native.Places] = {}
        """By process, by the two words of a walk; of codes that are as they were."""
        self._memory: tuple[tuple[int, int], procfs.HeldFile] | None = None
        """The process that was asked last, and its memory, open."""
        self._own_pid = os.getpid()
        """Our own code stays where it is once it ran: nothing here is made at run time."""
        self.unread = 0
        """Frames whose code object was gone, or another one, when it was looked at."""
        self.lineless = 0
        """Frames without a line, because the table had made room and was gone when asked for."""

    @property
    def held_bytes(self) -> int:
        """Of line tables, now."""
        return self._held.bytes

    def places(
        self, owners: Sequence[tuple[TrackedProcess, Interpreter]], codes: Iterable[int]
    ) -> _native.Places:
        """Frames of a process that are known by the two words of a walk.

        `codes`: first words that will be asked for. Each code object is looked at: where there is
        another one by now, nothing is known of its frames.
        """
        process, python = owners[0]
        if len(owners) > 1:
            return _native.Places()  # it is gone, and whose memory tells is seen frame by frame
        places = self._places.get(process.key)
        if places is None:
            if sum(map(len, self._places.values())) > MAX_PLACES:
                self._places = {}
            places = self._places[process.key] = _native.Places()
            return places
        if len(places) > MAX_PLACES:
            places.clear()
        for code in codes:
            at = code & ~PYTHON_FRAME
            known = self._known.get((*process.key, at))
            if known is None or self._code(process, python, at) is not known:
                places.drop(code)
        return places

    def frame(
        self,
        owners: Sequence[tuple[TrackedProcess, Interpreter]],
        code: int,
        where: int,
        places: _native.Places,
    ) -> KnownFrame:
        """The frame of the two words that a walk brought; NO_FRAME for no code of anybody.

        `owners`: in whose memory it may be, first the process itself, where that is known.
        `where`: first line << 32 | place of the instruction, as the kernel packs it.
        `places`: where it is noted.
        """
        for process, python in owners:
            found = self._find(process, python, code, where)
            if found is not None:
                places.put(code, where, found, absent=found is NO_FRAME)
                return found
        self.unread += 1
        places.put(code, where, _UNREAD)  # until its code is looked at again
        return _UNREAD

    def _find(
        self, process: TrackedProcess, python: Interpreter, code: int, where: int
    ) -> KnownFrame | None:
        first_line, place = (where >> 32) & 0x7FFFFFFF, where & 0xFFFFFFFF
        known = self._code(process, python, code & ~PYTHON_FRAME)
        if known is None or known.first_line != first_line:
            return None
        found = self._frames.get((known.number, place))
        if found is None:
            found = self._make(process, known, python, place)
            self._frames.put((known.number, place), found)
        return found

    def _make(
        self, process: TrackedProcess, known: _CodeObject, python: Interpreter, place: int
    ) -> KnownFrame:
        if not known.first_line and known.file == known.function:
            return NO_FRAME  # the interpreter's own glue, such as the call of __init__ (3.12 on)
        signed = place - (place >> 31 << 32)
        offset = signed - python.code.instructions if python.code.instructions else 2 * signed
        lines = known.lines if known.lines is not None else self._lines(process, known, python)
        line = 0
        if lines is not None:
            line = line_at(lines, known.first_line, offset, python.version)
        if not 0 < line < MAX_LINE:
            line = 0
        frame = Frame("python", known.function, "[python]", file=known.file, line=line)
        return KnownFrame(frame_id(frame), frame)

    def _lines(
        self, process: TrackedProcess, known: _CodeObject, python: Interpreter
    ) -> bytes | None:
        """The line table of a code object once more; None where it is gone, which is counted."""
        try:
            lines = _lines_of(self._memory_of(process), known.head, python.code)
        except (OSError, struct.error, OverflowError):
            self.lineless += 1
            return None
        self._held.hold(known, lines)
        return lines

    def _code(self, process: TrackedProcess, python: Interpreter, at: int) -> _CodeObject | None:
        key = (*process.key, at)
        now_ns = time.monotonic_ns()
        known = self._known.get(key)
        if known is not None and (
            now_ns - known.checked_ns < TRUST_NS or process.pid == self._own_pid
        ):
            return known
        try:
            memory = self._memory_of(process)
            head = memory.read_at(python.code.linetable + 8, at)
            if not head:  # it may run another program by now
                self.close()
                memory = self._memory_of(process)
                head = memory.read_at(python.code.linetable + 8, at)
        except OSError:
            return known  # it ended: what was known is the best there is
        try:
            if known is not None and known.head[16:] == head[16:]:
                known.checked_ns = now_ns
                return known
            known = _read(memory, process.pid, python, head, now_ns)
            self._held.hold(known, _lines_of(memory, head, python.code))
            self._known.put(key, known)
            return known
        except (OSError, struct.error, UnicodeDecodeError, OverflowError):
            return known

    def _memory_of(self, process: TrackedProcess) -> procfs.HeldFile:
        """A process's memory, open until `close`: one stack has many frames to be asked for."""
        if self._memory is not None and self._memory[0] == process.key:
            return self._memory[1]
        self.close()
        memory = procfs.HeldFile(f"/proc/{process.pid}/mem")
        self._memory = (process.key, memory)
        return memory

    def close(self) -> None:
        """Let go of the memory that is open."""
        if self._memory is not None:
            self._memory[1].close()
            self._memory = None


def _read(
    memory: procfs.HeldFile, pid: int, python: Interpreter, head: bytes, now_ns: int
) -> _CodeObject:
    layout: Code = python.code
    (first_line,) = struct.unpack_from("<i", head, layout.first_line)
    filename, name = (
        struct.unpack_from("<Q", head, at)[0] for at in (layout.filename, layout.qualname)
    )
    file = _text(memory, filename, python.version)
    return _CodeObject(
        head=head,
        function=intern(_text(memory, name, python.version)),
        file=intern(shown(file, pid)),
        first_line=first_line,
        lines=None,
        checked_ns=now_ns,
    )


def _lines_of(memory: procfs.HeldFile, head: bytes, layout: Code) -> bytes:
    (at,) = struct.unpack_from("<Q", head, layout.linetable)
    (length,) = struct.unpack("<q", memory.read_at(8, at + 16))
    return memory.read_at(max(0, min(length, MAX_LINES_BYTES)), at + 32)


def _text(memory: procfs.HeldFile, at: int, version: tuple[int, int]) -> str:
    """A str: PyASCIIObject or PyCompactUnicodeObject (Include/cpython/unicodeobject.h)."""
    head = memory.read_at(40, at)
    length, _, state = struct.unpack_from("<qqI", head, 16)
    # interned: 2 bits; from 3.14 on a field of its own, of 16 bits at most
    shift = 2
    if version >= (3, 14) and not state >> 2 & 7:
        shift = 16
    kind, is_ascii = state >> shift & 7, state >> (shift + 4) & 1
    after_ascii, after_compact = _UNICODE_3_12 if version >= (3, 12) else _UNICODE_3_10
    length = max(0, min(length, MAX_TEXT))
    raw = memory.read_at(length * max(kind, 1), at + (after_ascii if is_ascii else after_compact))
    encoding = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}.get(kind, "latin-1")
    text = raw.decode(encoding, "replace")[:length]  # a kind that there is not reads more
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def shown(path: str, pid: int) -> str:
    """A source file as frames show it: relative to its package or project, never a full path."""
    for folder in _INSTALLED:
        if folder in path:
            return path.rpartition(folder)[2]
    parts = path.split("/")
    for i, part in enumerate(parts[:-1]):
        if i and parts[i - 1] == "lib" and part.startswith("python3"):
            return "/".join(parts[i + 1 :])
    if not path.startswith("/"):
        return path.removeprefix("./")
    with suppress(OSError):
        folder = procfs.read_link(f"/proc/{pid}/cwd")
        if folder != "/" and path.startswith(folder + "/"):
            return path.removeprefix(folder + "/")
    return "/".join(parts[-2:])
