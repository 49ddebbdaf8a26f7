# SPDX-License-Identifier: Apache-2.0
"""Names, files and lines of JavaScript functions, read from the memory of a running V8."""

from __future__ import annotations

import re
import struct
import sys
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

from sonde.procfs.long_texts import short_end, short_name
from sonde.resolve.lru_cache import LruCache
from sonde.unwind.process_memory import Memory
from sonde.unwind.v8_layout import FAILURES, SCOPE_WORDS, V8Layout
from sonde.unwind.v8_objects import V8Objects, position_at

MAX_FUNCTIONS: Final = 16_384
"""Of one V8."""
MAX_SCRIPTS: Final = 1_024
MAX_SOURCE: Final = 8 << 20
"""Characters of a script in which lines are counted."""
MAX_LINES: Final = 1 << 18
MAX_CALLS: Final = 64
"""Lines of bytecodes that are kept of one function."""
_CALL_BYTES: Final = 128
"""Memory that one of them takes, about."""
MAX_ALL_BYTES: Final = 8 << 20
"""Of names, tables and lines of one V8. Beyond it, all are read again when they are needed."""
TRUST_NS: Final = 10_000_000_000
"""How long a function is used before it is read again: its memory may have another by then."""
ANONYMOUS: Final = "(anonymous)"
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_SEPARATOR: Final = re.compile(rb"[\x28\x29]\x20")
"""In UTF-16: U+2028 and U+2029 end lines of JavaScript, too."""
_ALL_ONES: Final = bytes([0]) + 255 * b"\xff"
"""For bytes.translate: 255 for each byte that is not 0."""
_MAX_LOCALS: Final = 75
"""With more local variables, their names are in one hash table."""
_SHARED_BYTES: Final = 64
"""Of a SharedFunctionInfo that are read."""


@dataclass(frozen=True, slots=True)
class V8Script:
    """One script."""

    file: str
    """Name without folders; of Node.js's modules node:…; '' unknown."""
    line_ends: array[int]
    """Offsets of line ends in its text, in characters; empty: unknown."""
    source: tuple[int, int] = (0, 0)
    """(tagged pointer, characters) of the text in which they were found."""

    @property
    def bytes(self) -> int:
        """Memory that it takes, about."""
        return sys.getsizeof(self.file) + sys.getsizeof(self.line_ends) + 256

    def line_at(self, offset: int) -> int:
        """The line of a character, from 1; 0 unknown."""
        if not self.line_ends or offset < 0:
            return 0
        return bisect_left(self.line_ends, offset) + 1


NO_SCRIPT: Final = V8Script("", array("I"))


@dataclass(slots=True)
class V8Function:
    """One function."""

    name: str
    script: V8Script
    line: int
    """The first one; 0: unknown."""
    is_builtin: bool
    """It has no source."""
    bytecode: int
    """Tagged pointer to its BytecodeArray; 0: it has none now."""
    read_ns: int
    positions: bytes | None = None
    """The bytecode's table of source positions; None: not read yet."""
    lines: dict[int, int] = field(default_factory=dict)
    """By offset of a bytecode, as far as they were needed."""

    @property
    def bytes(self) -> int:
        """Memory that it takes, about."""
        return sys.getsizeof(self.name) + 256


class V8Functions:
    """The functions of one V8, by address of the SharedFunctionInfo."""

    def __init__(self, layout: V8Layout) -> None:
        self._layout = layout
        self.objects = V8Objects(layout)
        self._known: LruCache[int, V8Function] = LruCache(MAX_FUNCTIONS)
        self._scripts: LruCache[int, tuple[V8Script, int]] = LruCache(MAX_SCRIPTS)
        """(script, when it was read in ns) by tagged pointer."""
        self._bytes = 0
        self.drops = 0
        """How often all were dropped, as they took too much memory."""

    def find(self, memory: Memory, at: int, now_ns: int) -> V8Function | None:
        """The function at an address, if need be as it was read before; None: it was never read."""
        known = self._known.get(at)
        if known is not None and now_ns < known.read_ns + TRUST_NS:
            return known
        try:
            found = self._read(memory, at, now_ns)
        except FAILURES:
            return known
        self.keep(found.bytes - (known.bytes if known is not None else 0))
        self._known.put(at, found)
        return found

    def line_of_bytecode(self, memory: Memory, function: V8Function, bytecode: int) -> int:
        """The line of a bytecode (offset from the first one); that of the function where V8 has not
        kept it."""
        line = function.lines.get(bytecode)
        if line is None:
            line = self._line_of_bytecode(memory, function, bytecode)
            if len(function.lines) < MAX_CALLS:
                function.lines[bytecode] = line
                self.keep(_CALL_BYTES)
        return line

    def _line_of_bytecode(self, memory: Memory, function: V8Function, bytecode: int) -> int:
        if function.positions is None:
            function.positions = b""
            if function.bytecode:
                for offset in self._layout.positions:
                    try:
                        raw = self.objects.read_as(
                            memory, function.bytecode, 64, self._layout.of_bytecode
                        )
                        (table,) = struct.unpack_from("<Q", raw, offset)
                        function.positions = self.objects.byte_array(memory, table)
                        self.keep(len(function.positions))
                    except FAILURES:
                        continue
        return line_of(function, position_at(function.positions, bytecode))

    def keep(self, size: int) -> None:
        """Count bytes that are kept. Beyond the limit, all is dropped."""
        self._bytes += size
        if self._bytes > MAX_ALL_BYTES:
            self.forget()

    @property
    def held_bytes(self) -> int:
        """Memory of what is kept, at most."""
        return self._bytes

    def forget(self) -> None:
        """Drop all."""
        self._known, self._scripts = LruCache(MAX_FUNCTIONS), LruCache(MAX_SCRIPTS)
        self.objects.forget_types()
        self._bytes = 0
        self.drops += 1

    def _read(self, memory: Memory, at: int, now_ns: int) -> V8Function:
        layout = self._layout
        raw = self.objects.read_as(memory, at | 1, _SHARED_BYTES, layout.of_shared)
        data, name, script = (
            struct.unpack_from("<Q", raw, it)[0]
            for it in (layout.function_data, layout.name, layout.script)
        )
        text, start = self._name(memory, name)
        found = self._script(memory, script, now_ns) if script & 3 == 1 else NO_SCRIPT
        is_builtin = found is NO_SCRIPT and data & 1 == 0
        bytecode = self._bytecode(memory, data)
        line = found.line_at(start)
        return V8Function(short_name(text) or ANONYMOUS, found, line, is_builtin, bytecode, now_ns)

    def _name(self, memory: Memory, pointer: int) -> tuple[str, int]:
        """(name, offset of the function in the script, -1 unknown)."""
        if pointer & 1 == 0:
            return "", -1
        type_, raw = self.objects.read(memory, pointer, 8 * (SCOPE_WORDS + 1))
        if type_ < self._layout.first_other:
            return printable(self.objects.text(memory, pointer)), -1
        if type_ != self._layout.of_scope:
            raise ValueError("a function without a name")
        return self._scope(memory, pointer, raw)

    def _scope(self, memory: Memory, pointer: int, raw: bytes) -> tuple[str, int]:
        """The same of a ScopeInfo, whose words depend on its flags and on V8's version."""
        layout = self._layout
        words = struct.unpack(f"<{len(raw) // 8 - 1}Q", raw[8 : len(raw) & -8])
        locals_ = words[layout.context_locals] >> 32
        first = layout.first_names
        start = words[3] >> 32 if layout.has_fixed_position else -1
        first += 2 * locals_ if locals_ <= _MAX_LOCALS else 1 + locals_
        if first + 8 > len(words):
            if locals_ > 1 << 16:
                raise ValueError("too many variables")
            at = pointer - 1 + 8 * (1 + first)
            more = memory.read_at(8 * 12, at)
            words = struct.unpack(f"<{len(more) // 8}Q", more[: len(more) & -8])
            first = 0
        name, run = "", []
        for word in words[first : first + 12]:
            if word & 1 == 0:
                run.append(word >> 32)
                continue
            if len(run) >= 2 and not layout.has_fixed_position:
                break
            run = []
            if not name:
                try:
                    name = printable(self.objects.text(memory, word))
                except FAILURES:
                    break
        if not layout.has_fixed_position and len(run) >= 2:
            start = run[-2]
        return name, start

    def _bytecode(self, memory: Memory, pointer: int) -> int:
        """Its BytecodeArray; 0 without one."""
        layout = self._layout
        for _ in range(3):
            try:
                type_, raw = self.objects.read(memory, pointer, 64)
                if type_ == layout.of_bytecode:
                    return pointer
                if type_ != layout.of_code:
                    return 0
                # Sparkplug's code has it where other code has deoptimization data.
                (pointer,) = struct.unpack_from("<Q", raw, layout.code_positions - 8)
            except FAILURES:
                return 0
        return 0

    def _script(self, memory: Memory, pointer: int, now_ns: int) -> V8Script:
        known = self._scripts.get(pointer)
        if known is not None and now_ns < known[1] + TRUST_NS:
            return known[0]
        layout = self._layout
        size = max(layout.script_name, layout.script_source, layout.line_ends) + 8
        type_, raw = self.objects.read(memory, pointer, size)
        if type_ != layout.of_script or len(raw) != size:
            return NO_SCRIPT
        name, source, ends = (
            struct.unpack_from("<Q", raw, it)[0]
            for it in (layout.script_name, layout.script_source, layout.line_ends)
        )
        text = ""
        if name & 3 == 1:
            try:
                text = printable(self.objects.text(memory, name, 4096))
            except FAILURES:
                text = ""
        file = short_end(text if text.startswith("node:") else text.rpartition("/")[2])
        text_of = source, self._characters(memory, source)
        if known is not None and known[0].line_ends and known[0].source == text_of:
            if known[0].file == file:
                found = known[0]
            else:
                found = V8Script(file, known[0].line_ends, text_of)
                self.keep(found.bytes)
        else:
            found = V8Script(file, self._line_ends(memory, source, ends), text_of)
            self.keep(found.bytes)
        self._scripts.put(pointer, (found, now_ns))
        return found

    def _characters(self, memory: Memory, source: int) -> int:
        """How many a script's text has; 0 where it cannot be read."""
        try:
            _, raw = self.objects.read(memory, source, self._layout.length + 4)
            (length,) = struct.unpack_from("<i", raw, self._layout.length)
        except FAILURES:
            return 0
        return int(length)

    def _line_ends(self, memory: Memory, source: int, ends: int) -> array[int]:
        """Offsets of line ends: V8's own table (`ends`) where it has made one, else by the text."""
        found = array("I")
        try:
            if ends & 3 == 1:
                type_, raw = self.objects.read(memory, ends, 16)
                count = struct.unpack_from("<q", raw, 8)[0] >> 32
                if type_ == self._layout.of_array and 0 < count <= MAX_LINES:
                    words = array("Q", memory.read_at(8 * count, ends - 1 + 16))
                    return array("I", (min(it >> 32, 0xFFFFFFFF) for it in words))
            offset, is_after_return = 0, False
            for piece, encoding in self.objects.parts(memory, source, MAX_SOURCE):
                text = piece if encoding == "latin-1" else _low_bytes(piece)
                skipped = int(is_after_return and text.startswith(b"\n"))
                here = [match.start() for match in _LINE_END.finditer(text, skipped)]
                if text is not piece:
                    here = sorted([*here, *_separators(piece)])
                found.extend(offset + it for it in here[: MAX_LINES - len(found)])
                if len(found) >= MAX_LINES:
                    return found
                offset += len(text)
                is_after_return = text.endswith(b"\r") or (is_after_return and not text)
        except FAILURES:
            return array("I")
        return found


def _separators(text: bytes) -> list[int]:
    """Positions of U+2028 and U+2029 in UTF-16, in characters."""
    starts = (match.start() for match in _SEPARATOR.finditer(text))
    return [it // 2 for it in starts if it % 2 == 0]


def _low_bytes(text: bytes) -> bytes:
    """One byte for each character of UTF-16: 255 for those that need both bytes."""
    low, high = text[::2], text[1::2].translate(_ALL_ONES)
    both = int.from_bytes(low, "little") | int.from_bytes(high, "little")
    return both.to_bytes(len(low), "little")


def line_of(function: V8Function, position: int) -> int:
    """The line of a source position (`v8_objects.position_at`); the function's first one where
    there is none."""
    offset = (position >> 1 & (1 << 30) - 1) - 1
    if position & 1 or offset < 0:
        return function.line
    return function.script.line_at(offset) or function.line


def printable(text: str) -> str:
    """A text with ? for characters that cannot be printed."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
