# SPDX-License-Identifier: Apache-2.0
"""Names, files and lines of Ruby's methods and blocks, read from the memory of a running Ruby.

It is memory of the profiled process, and changes while it is read: a pointer may lead anywhere, and
every length has a limit.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from itertools import islice
from sys import getsizeof
from typing import Final

from sonde.procfs.long_texts import short_name
from sonde.resolve.lru_cache import LruCache
from sonde.unwind import ruby_layout as of
from sonde.unwind.function_names import FAILURES, MAX_LINE, Function, one_line, skipped_bytes
from sonde.unwind.process_memory import Memory, read_exactly, read_word
from sonde.unwind.ruby_layout import RubyLayout

MAX_NAME: Final = 256
"""Bytes of a name."""
MAX_PATH: Final = 4096
"""Bytes of a path; of a longer one the last ones."""
MAX_LINES: Final = 1 << 20
"""Rows of an instruction sequence's table of lines."""
MAX_IDS: Final = 4_096
MAX_ID_BYTES: Final = 128 << 10
"""Of the names of methods in C that are kept of one Ruby."""
MAX_SEARCHED_BYTES: Final = 1 << 20
"""Of Ruby's variables, in which the table of symbols is searched."""
MAX_CANDIDATES: Final = 64
"""Places there that look like that table and are checked."""
_WORD: Final = 8
_BODY_BYTES: Final = 160
_UNNAMED: Final = "(unnamed)"
_KNOWN_NAMES: Final = ((ord("+"), "+"), (ord("-"), "-"), (ord("*"), "*"))
"""Operators whose number is their character (id.h): the table of symbols has these names."""


class RubyNames:
    """Reads the functions of one Ruby."""

    def __init__(self, layout: RubyLayout, variables: int, end: int) -> None:
        """`variables`, `end`: addresses of the data (.data, .bss) of the file that Ruby is in."""
        self._layout = layout
        self._variables = variables, end
        self._symbols: int | None = None
        """Address of the table of symbols; 0: not found, None: not looked for."""
        self._ids: LruCache[int, str] = LruCache(MAX_IDS, MAX_ID_BYTES, getsizeof)

    def read(self, memory: Memory, at: int, is_native: bool, pid: int) -> Function:
        """The function at an address: an instruction sequence, or the entry of a method in C.

        Raises OSError, ValueError, struct.error.
        """
        if is_native:
            return Function(self._name_of_entry(memory, at), "", 0)
        body = read_word(memory, at + of.ISEQ_BODY)
        raw = read_exactly(memory, _BODY_BYTES, body)
        path, label = (struct.unpack_from("<Q", raw, it)[0] for it in (of.PATH, of.LABEL))
        return Function(
            short_name(one_line(self._text(memory, label, MAX_NAME))) or _UNNAMED,
            self._path(memory, path),
            0,
            place=body,
        )

    def line_at(self, memory: Memory, function: Function, place: int) -> int:
        """The line of an instruction, the one before `place`; 0 unknown. Raises as `read`."""
        if not function.place:
            return 0
        raw = read_exactly(memory, _BODY_BYTES, function.place)
        (encoded,) = struct.unpack_from("<Q", raw, of.ENCODED)
        lines, _, count, table = struct.unpack_from("<QQIxxxxQ", raw, self._layout.lines)
        index = max((place - encoded) // _WORD - 1, 0) if place >= encoded else 0
        if not 0 < count <= MAX_LINES:
            return 0
        row = self._row(memory, table, index) if count > 1 else 0
        if not 0 <= row < count:
            return 0
        (line,) = struct.unpack("<i", read_exactly(memory, 4, lines + row * of.LINE_BYTES))
        return line if 0 < line < MAX_LINE else 0

    @staticmethod
    def _row(memory: Memory, table: int, index: int) -> int:
        """The row for an instruction: how many begin up to it, less 1 (succ_index_lookup)."""
        if index < of.TABLE_IMMEDIATE:
            part = read_word(memory, table + index // 9 * _WORD)
            return (part >> index % 9 * 7 & 0x7F) - 1
        number, inside = divmod(index - of.TABLE_IMMEDIATE, 512)
        block = read_exactly(
            memory, of.BLOCK_BYTES, table + of.TABLE_BLOCKS + number * of.BLOCK_BYTES
        )
        numbers: tuple[int, ...] = struct.unpack("<I4xQ8Q", block)
        rank, ranks = numbers[:2]
        word, bit = divmod(inside, 64)
        before = ranks >> (word - 1) * 9 & 0x1FF if word else 0
        return rank + before + (numbers[2 + word] & (2 << bit) - 1).bit_count() - 1

    def _path(self, memory: Memory, pointer: int) -> str:
        """The real path of a file, or else the one that was given."""
        flags = read_word(memory, pointer)
        if flags & of.T_MASK == of.T_ARRAY:
            given, real = struct.unpack("<QQ", read_exactly(memory, 16, _items(memory, pointer)))
            try:
                return one_line(self._text(memory, real, MAX_PATH, from_end=True))
            except FAILURES:
                pointer = given
        return one_line(self._text(memory, pointer, MAX_PATH, from_end=True))

    def _text(self, memory: Memory, pointer: int, limit: int, from_end: bool = False) -> str:
        """The text of a String, of which at most `limit` bytes are read, the first or the last
        ones. Raises OSError; ValueError where it is none."""
        if pointer & 7:
            raise ValueError("no pointer to an object")
        flags, _, length, second = struct.unpack("<QQqQ", read_exactly(memory, 32, pointer))
        if flags & of.T_MASK != of.T_STRING:
            raise ValueError("no String")
        at = pointer + self._layout.embedded
        if flags & of.STRING_IS_APART:
            at = second
        elif self._layout.has_short_length:
            length = flags >> 14 & 0x1F
        if length <= 0:
            return ""
        if from_end:
            at += skipped_bytes(length, limit)
        return memory.read_at(min(length, limit), at).decode("utf-8", "replace")

    def _name_of_entry(self, memory: Memory, at: int) -> str:
        """The name by which a method in C was called."""
        for _ in range(2):
            flags, second = struct.unpack("<QQ", read_exactly(memory, 16, at))
            kind = flags >> of.IMEMO_SHIFT & of.IMEMO_MASK
            if kind != of.IMEMO_SVAR:
                break
            at = second  # an svar is in its place, and has a pointer to it
        if kind != of.IMEMO_METHOD:
            raise ValueError("no entry of a method")
        return self._name_of_id(memory, read_word(memory, at + of.CALLED_ID))

    def _name_of_id(self, memory: Memory, number: int) -> str:
        known = self._ids.get(number)
        if known is not None:
            return known
        if self._symbols is None:
            self._symbols = self._find_symbols(memory)
        if not self._symbols:
            return _UNNAMED
        serial = number if number <= self._layout.last_operator else number >> of.ID_SCOPE_BITS
        name = short_name(one_line(self._symbol(memory, self._symbols, serial))) or _UNNAMED
        self._ids.put(number, name)
        return name

    def _symbol(self, memory: Memory, symbols: int, serial: int) -> str:
        last, _, ids = struct.unpack("<IxxxxQQ", read_exactly(memory, 24, symbols))
        if serial > last:
            raise ValueError("no such symbol")
        piece, inside = divmod(serial, of.IDS_A_PIECE)
        names = read_word(memory, _items(memory, ids) + piece * _WORD)
        return self._text(
            memory, read_word(memory, _items(memory, names) + 2 * inside * _WORD), MAX_NAME
        )

    def _find_symbols(self, memory: Memory) -> int:
        """The table of symbols among Ruby's variables, as stripped files have no symbol for it; 0:
        not found."""
        start, end = self._variables
        if not 0 < end - start <= MAX_SEARCHED_BYTES:
            return 0
        raw = read_exactly(memory, end - start, start)
        words = struct.unpack(f"<{len(raw) // _WORD}Q", raw[: len(raw) & -_WORD])
        candidates = (
            start + at * _WORD
            for at in range(len(words) - of.SYMBOLS_BYTES // _WORD + 1)
            if self._layout.last_operator < words[at] < 1 << 24
            and all(map(_may_point, words[at + 1 : at + 4]))
        )
        for symbols in islice(candidates, MAX_CANDIDATES):
            with suppress(*FAILURES):
                if all(self._symbol(memory, symbols, id_) == it for id_, it in _KNOWN_NAMES):
                    return symbols
        return 0


def _may_point(word: int) -> bool:
    """Whether a word may be an aligned address of user space."""
    return not word & 7 and 1 << 16 < word < 1 << 47


def _items(memory: Memory, pointer: int) -> int:
    """Where the items of an Array are."""
    if pointer & 7:
        raise ValueError("no pointer to an object")
    flags = read_word(memory, pointer)
    if flags & of.T_MASK != of.T_ARRAY:
        raise ValueError("no Array")
    return pointer + 16 if flags & of.ARRAY_IS_INSIDE else read_word(memory, pointer + 32)
