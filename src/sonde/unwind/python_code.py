# SPDX-License-Identifier: Apache-2.0
"""Names Python frames by reading the memory of the process that runs them.

A stack walk yields the address of a code object, its first line and an instruction. This module
reads names and lines once for each code object. CPython reuses the memory of freed code objects.
So a cached code object is valid only while its first bytes are unchanged (but for the reference
count and the type, 16 bytes: each use changes the count), and for a sample only if its first line
is the one that the walk yielded.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from sonde import _native, procfs
from sonde.model.code import Frame, KnownFrame
from sonde.procfs.long_texts import short_end, short_name
from sonde.resolve.code_origin import origin_of_source
from sonde.resolve.frame_fields import FRAME_BYTES, frame_bytes, frame_id
from sonde.resolve.lru_cache import LruCache
from sonde.resolve.shared_texts import shared
from sonde.resolve.tracked_process import TrackedProcess
from sonde.unwind.cpython import CodeLayout, Interpreter
from sonde.unwind.process_memory import Memory, ProcessMemory
from sonde.unwind.python_lines import line_at
from sonde.unwind.python_objects import decoded, text_shape

INTERPRETED_FRAME: Final = 1 << 63
"""Bit of a stack's word that marks it as one of the two words of an interpreted frame. Of Python's
the first word is a code object, the second the position in it."""
MAX_CODE: Final = 32_768
"""Code objects of all processes."""
MAX_CODE_BYTES: Final = 16 << 20
"""Of those together, without line tables."""
MAX_TEXT: Final = 512
"""Characters of a name or path; of a longer path the last ones."""
MAX_LINE: Final = 1 << 31
MAX_LINES_BYTES: Final = 1 << 18
"""Of one line table; instructions beyond it get the last line before."""
MAX_ALL_LINES_BYTES: Final = 8 << 20
"""Of all line tables. Evicted ones are read again for a new instruction."""
MAX_AHEAD: Final = 64
"""Code objects that are read together."""
MAX_AHEAD_BYTES: Final = 1 << 20
"""Of their texts and line tables; beyond that each is read by itself."""
MAX_FRAMES: Final = 65_536
MAX_FRAME_BYTES: Final = 24 << 20
"""Of those frames, where texts that several have count for each."""
MAX_CACHED_FRAMES: Final = 16_384
"""In the caches of processes, by which native code names whole stacks; then they are cleared."""
MAX_CACHED_BYTES: Final = 24 << 20
"""Of frames that were put there since they were cleared."""
_REFERENCE_BYTES: Final = 100
_CODE_BYTES: Final = 400
"""Memory of a code object beside what its head and its texts take."""
TRUST_NS: Final = 200_000_000
"""How long a code object is used without checking its memory again, if not set otherwise."""
LONGER_TRUST_NS: Final = 10_000_000_000
"""The same where its user has no CPU time left of the naming budget (`resolve`)."""
_UNKNOWN: Final = Frame("python", "", "[python]")
_numbers = count(1)
UNREAD: Final = KnownFrame(frame_id(_UNKNOWN), _UNKNOWN)
"""In place of a frame whose code object was not read."""
NO_FRAME: Final = KnownFrame(0, _UNKNOWN)
"""A mark, not a frame: code of the interpreter itself, which is not shown."""
_INSTALLED: Final = ("/site-packages/", "/dist-packages/")


@dataclass(slots=True, weakref_slot=True)
class _CodeObject:
    head: bytes
    """Its first bytes, to the end of the pointer to the line table."""
    function: str
    file: str
    origin: str
    """A value of `CodeOrigin`."""
    first_line: int
    lines: bytes | None
    """Line table; None where it was evicted."""
    checked_ns: int
    """When `head` was last found unchanged."""
    number: int = field(default_factory=lambda: next(_numbers))


def _code_bytes(code: _CodeObject) -> int:
    return _CODE_BYTES + sum(map(sys.getsizeof, (code.head, code.function, code.file)))


class _LineTables:
    """Evicts the oldest half of the line tables when a limit of bytes is reached. Keeps no code
    object alive."""

    def __init__(self, limit_bytes: int) -> None:
        self._half_bytes = limit_bytes // 2
        self._old: list[weakref.ref[_CodeObject]] = []
        self._young: list[weakref.ref[_CodeObject]] = []
        self._young_bytes = 0

    def add(self, code: _CodeObject, lines: bytes) -> None:
        """Set the line table of a code object; evict others if necessary."""
        size = sys.getsizeof(lines) + _REFERENCE_BYTES
        if self._young_bytes + size > self._half_bytes:
            for it in self._old:
                if (old := it()) is not None:
                    old.lines = None
            self._old, self._young, self._young_bytes = self._young, [], 0
        code.lines = lines
        self._young.append(weakref.ref(code))
        self._young_bytes += size

    @property
    def bytes(self) -> int:
        """Size of all line tables now."""
        held = [it for each in (*self._old, *self._young) if (it := each()) is not None]
        return sum(sys.getsizeof(it.lines) for it in held if it.lines is not None)


class PythonCode:
    """The code objects of all processes, and the frames made of them."""

    def __init__(self, max_line_table_bytes: int = MAX_ALL_LINES_BYTES) -> None:
        self._known: LruCache[tuple[int, int, int], _CodeObject] = LruCache(
            MAX_CODE, MAX_CODE_BYTES, _code_bytes
        )
        self._frames: LruCache[tuple[int, int], KnownFrame] = LruCache(
            MAX_FRAMES, MAX_FRAME_BYTES, frame_bytes
        )
        """By number of the code object and offset of the instruction."""
        self._line_tables = _LineTables(max_line_table_bytes)
        self._caches: dict[tuple[int, int], _native.FrameCache] = {}
        """Of each process: frames by the two words of a stack walk."""
        self._cached_bytes = 0
        self._put_off: set[tuple[int, int]] = set()
        """Processes with frames in their caches that are to be read later."""
        self._memory: tuple[tuple[int, int], ProcessMemory] | None = None
        """(process key, open memory) of the process read last."""
        self._own_pid = os.getpid()
        """Pid of this process, which creates no code objects at run time: they need no check."""
        self.unread = 0
        """Frames whose code object was freed or replaced before it was read."""
        self.lineless = 0
        """Frames without a line: the line table was evicted, and the process has ended."""
        self.trust_ns = TRUST_NS
        """How long a code object is used without checking its memory again."""

    @property
    def line_table_bytes(self) -> int:
        """Size of all line tables now."""
        return self._line_tables.bytes

    def frame_cache(
        self,
        lineage: Sequence[tuple[TrackedProcess, Interpreter]],
        codes: Iterable[int],
        is_over: Callable[[], bool] = lambda: False,
    ) -> _native.FrameCache:
        """The cache of a process: frames by the two words of a stack walk.

        `lineage`: see `frame`. `codes`: first words of the stacks that will be named. Their code
        objects are checked, and frames of replaced ones are dropped. Once `is_over`, those that
        were not checked lately are dropped.
        """
        process, python = lineage[0]
        if len(lineage) > 1:
            # It has ended: each frame may be in another process's memory.
            return _native.FrameCache()
        if self._cached_bytes > MAX_CACHED_BYTES:
            self._clear_caches()
        cache = self._caches.get(process.key)
        if cache is None:
            if sum(map(len, self._caches.values())) > MAX_CACHED_FRAMES:
                self._clear_caches()
            cache = self._caches[process.key] = _native.FrameCache()
            return cache
        if len(cache) > MAX_CACHED_FRAMES or (process.key in self._put_off and not is_over()):
            cache.clear()
            self._put_off.discard(process.key)
        trusted_ns = time.monotonic_ns() - LONGER_TRUST_NS
        for code in codes:
            at = code & ~INTERPRETED_FRAME
            known = self._known.get((*process.key, at))
            if known is None:
                is_same = False
            elif is_over():
                is_same = known.checked_ns > trusted_ns
            else:
                is_same = self._code(process, python, at) is known
            if not is_same:
                cache.drop(code)
        return cache

    def _clear_caches(self) -> None:
        self._caches, self._put_off, self._cached_bytes = {}, set(), 0

    def put_off(
        self, process: TrackedProcess, code: int, where: int, cache: _native.FrameCache
    ) -> KnownFrame:
        """UNREAD, for a frame that is read once `frame_cache` may read again. See `frame`."""
        if self._caches.get(process.key) is cache:
            self._put_off.add(process.key)
        cache.put(code, where, UNREAD)
        self._cached_bytes += FRAME_BYTES
        return UNREAD

    def frame(
        self,
        lineage: Sequence[tuple[TrackedProcess, Interpreter]],
        code: int,
        where: int,
        cache: _native.FrameCache,
    ) -> KnownFrame:
        """The frame of two words of a stack walk; NO_FRAME for one to hide.

        `lineage`: the processes whose memory may hold the code object, the process itself first; of
        one that has ended others follow, which were forked from the same program.
        `code`: address | INTERPRETED_FRAME. `where`: first line << 32 | offset of the instruction.
        `cache`: where to store the frame.
        """
        for process, python in lineage:
            found = self._find(process, python, code, where)
            if found is not None:
                cache.put(code, where, found, absent=found is NO_FRAME)
                self._cached_bytes += frame_bytes(found)
                return found
        self.unread += 1
        cache.put(code, where, UNREAD)  # until its code object is checked again
        self._cached_bytes += FRAME_BYTES
        return UNREAD

    def _find(
        self, process: TrackedProcess, python: Interpreter, code: int, where: int
    ) -> KnownFrame | None:
        first_line, position = (where >> 32) & 0x7FFFFFFF, where & 0xFFFFFFFF
        known = self._code(process, python, code & ~INTERPRETED_FRAME)
        if known is None or known.first_line != first_line:
            return None
        found = self._frames.get((known.number, position))
        if found is None:
            found = self._make(process, known, python, position)
            self._frames.put((known.number, position), found)
        return found

    def _make(
        self, process: TrackedProcess, known: _CodeObject, python: Interpreter, position: int
    ) -> KnownFrame:
        if not known.first_line and known.file == known.function:
            return NO_FRAME  # code of the interpreter itself: the call of __init__ (3.12 on)
        # An offset in the object, or (3.10) an index of instructions of two bytes: see CodeLayout.
        signed = position - (position >> 31 << 32)
        offset = signed - python.code.instructions if python.code.instructions else 2 * signed
        lines = known.lines if known.lines is not None else self._lines(process, known, python)
        line = 0
        if lines is not None:
            line = line_at(lines, known.first_line, offset, python.version)
        if not 0 < line < MAX_LINE:
            line = 0
        frame = Frame(
            "python", known.function, "[python]", file=known.file, line=line, origin=known.origin
        )
        return KnownFrame(frame_id(frame), frame)

    def _lines(
        self, process: TrackedProcess, known: _CodeObject, python: Interpreter
    ) -> bytes | None:
        """Read an evicted line table again; None, counted in `lineless`, where it is gone."""
        try:
            lines = _lines_of(self._memory_of(process), known.head, python.code)
        except (OSError, struct.error, OverflowError):
            self.lineless += 1
            return None
        self._line_tables.add(known, lines)
        return lines

    def _code(self, process: TrackedProcess, python: Interpreter, at: int) -> _CodeObject | None:
        """The code object at an address, checked or read now; None where it cannot be read."""
        key = (*process.key, at)
        now_ns = time.monotonic_ns()
        known = self._known.get(key)
        if known is not None and (
            now_ns - known.checked_ns < self.trust_ns or process.pid == self._own_pid
        ):
            return known
        try:
            memory = self._memory_of(process)
            head = memory.read_at(python.code.linetable + 8, at)
            if not head:  # the open memory is that of an earlier program
                self.close()
                memory = self._memory_of(process)
                head = memory.read_at(python.code.linetable + 8, at)
        except OSError:
            return known  # it has ended: use what was read before
        if known is not None and known.head[16:] == head[16:]:
            known.checked_ns = now_ns
            return known
        try:
            ((found, lines),) = _read(memory, process.pid, python, [head], now_ns)
        except (OSError, ValueError):
            return known
        self._keep(key, found, lines)
        return found

    def read_ahead(
        self, lineage: Sequence[tuple[TrackedProcess, Interpreter]], codes: Sequence[int]
    ) -> None:
        """Check or read the code objects of `codes`, at most `MAX_AHEAD`, by three requests in all,
        where `frame` takes one to three for each. What cannot be read is left to `frame`.

        `lineage`: see `frame`. `codes`: first words of the stacks that will be named.
        """
        process, python = lineage[0]
        if len(lineage) > 1 or process.pid == self._own_pid:
            return
        now_ns = time.monotonic_ns()
        addresses = [code & ~INTERPRETED_FRAME for code in codes]
        known = {at: self._known.get((*process.key, at)) for at in addresses}
        due = [
            at for at, it in known.items() if it is None or now_ns - it.checked_ns >= self.trust_ns
        ]
        if len(due) < 2:  # `frame` reads one as well
            return
        size = python.code.linetable + 8
        try:
            memory = self._memory_of(process)
            heads = memory.read_many([(size, at) for at in due])
        except OSError:
            return
        unread: list[tuple[int, bytes]] = []
        for at, head in zip(due, heads, strict=True):
            before = known[at]
            if before is not None and before.head[16:] == head[16:]:
                before.checked_ns = now_ns
            elif len(head) == size:
                unread.append((at, head))
        if not unread:
            return
        try:
            found = _read(memory, process.pid, python, [head for _, head in unread], now_ns)
        except (OSError, ValueError):
            return
        for (at, _), (code, lines) in zip(unread, found, strict=True):
            self._keep((*process.key, at), code, lines)

    def _keep(self, key: tuple[int, int, int], code: _CodeObject, lines: bytes) -> None:
        self._line_tables.add(code, lines)
        self._known.put(key, code)

    def _memory_of(self, process: TrackedProcess) -> ProcessMemory:
        """The memory of a process, kept open: a stack has many frames."""
        if self._memory is not None and self._memory[0] == process.key:
            return self._memory[1]
        self.close()
        memory = ProcessMemory(*process.key)
        self._memory = (process.key, memory)
        return memory

    def close(self) -> None:
        """Close the open memory."""
        if self._memory is not None:
            self._memory[1].close()
            self._memory = None


def _read(
    memory: ProcessMemory, pid: int, python: Interpreter, heads: Sequence[bytes], now_ns: int
) -> list[tuple[_CodeObject, bytes]]:
    """Code objects and their line tables, in two requests for all: what they point at, and what
    that has. Raises OSError or ValueError where one of them cannot be read."""
    layout: CodeLayout = python.code
    try:
        pointers = [
            [
                struct.unpack_from("<Q", head, at)[0]
                for at in (layout.filename, layout.qualname, layout.linetable)
            ]
            for head in heads
        ]
        begins = memory.read_many(
            [
                part
                for file, name, table in pointers
                for part in ((40, file), (40, name), (8, table + 16))
            ]
        )
        parts: list[tuple[int, int]] = []
        kinds: list[int] = []
        for number, (file, name, table) in enumerate(pointers):
            of_file, of_name, size = begins[3 * number : 3 * number + 3]
            (length,) = struct.unpack("<q", size)
            for text, at in ((of_file, file), (of_name, name)):
                part, kind = _text_part(text, at, python.version, from_end=at == file)
                parts.append(part)
                kinds.append(kind)
            parts.append((max(0, min(length, MAX_LINES_BYTES)), table + 32))
        if len(heads) > 1 and sum(size for size, _ in parts) > MAX_AHEAD_BYTES:
            raise ValueError("too much at once")
        contents = memory.read_many(parts)
        if any(size and not content for (size, _), content in zip(parts, contents, strict=True)):
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        found: list[tuple[_CodeObject, bytes]] = []
        folder = _Folder(pid)
        for number, head in enumerate(heads):
            file_text, name_text = (
                _printable(
                    contents[3 * number + it], kinds[2 * number + it], parts[3 * number + it][0]
                )
                for it in (0, 1)
            )
            code = _CodeObject(
                head=head,
                function=shared(short_name(name_text)),
                file=shared(short_end(folder.short_path(file_text))),
                origin=origin_of_source(file_text).value,
                first_line=struct.unpack_from("<i", head, layout.first_line)[0],
                lines=None,
                checked_ns=now_ns,
            )
            found.append((code, contents[3 * number + 2]))
        return found
    except (struct.error, OverflowError, UnicodeDecodeError) as error:
        raise ValueError("no code object") from error


def _lines_of(memory: Memory, head: bytes, layout: CodeLayout) -> bytes:
    (at,) = struct.unpack_from("<Q", head, layout.linetable)
    (length,) = struct.unpack("<q", memory.read_at(8, at + 16))
    return memory.read_at(max(0, min(length, MAX_LINES_BYTES)), at + 32)


def _text_part(
    head: bytes, at: int, version: tuple[int, int], *, from_end: bool
) -> tuple[tuple[int, int], int]:
    """Where the characters of a str are, (size, address), and how many bytes each has; 0 for an
    invalid kind. A str: PyASCIIObject or PyCompactUnicodeObject (Include/cpython/unicodeobject.h),
    whose first 40 bytes are `head`."""
    length, _, state = struct.unpack_from("<qqI", head, 16)
    kind, _, begin = text_shape(state, version)
    skipped = max(0, length - MAX_TEXT) * max(kind, 1) if from_end else 0
    size = max(0, min(length, MAX_TEXT)) * max(kind, 1)
    return (size, at + begin + skipped), kind


def _printable(raw: bytes, kind: int, size: int) -> str:
    text = decoded(raw, kind)[: size // max(kind, 1)]  # an invalid kind reads more
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


class _Folder:
    """The working directory of a process, read where the first path needs it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._path: str | None = None

    def short_path(self, path: str) -> str:
        """As `short_path`."""
        return _short_path(path, self._folder)

    def _folder(self) -> str:
        if self._path is None:
            self._path = ""
            with suppress(OSError):
                self._path = procfs.read_link(f"/proc/{self._pid}/cwd")
        return self._path


def short_path(path: str, pid: int) -> str:
    """A source file as frames show it: relative to its package or project; else its last two parts.
    Never a full path."""
    return _Folder(pid).short_path(path)


def _short_path(path: str, folder_of: Callable[[], str]) -> str:
    for folder in _INSTALLED:
        if folder in path:
            return path.rpartition(folder)[2]
    parts = path.split("/")
    for i, part in enumerate(parts[:-1]):
        if i and parts[i - 1] == "lib" and part.startswith("python3"):
            return "/".join(parts[i + 1 :])
    if not path.startswith("/"):
        return path.removeprefix("./")
    folder = folder_of()
    if folder not in ("", "/") and path.startswith(folder + "/"):
        return path.removeprefix(folder + "/")
    return "/".join(parts[-2:])
