# SPDX-License-Identifier: Apache-2.0
"""Objects in the heap of a running V8: their types, texts and tables.

V8's words: a *Map* is the object that describes the layout and type (`instance_type`) of others. A
*tagged pointer* is an object's address plus 1; a small integer is in the upper half of a word. A
string is sequential (its characters follow), external (they lie elsewhere), cons (two strings after
one another), sliced (a part of another one), or thin (another one in its place).

The heap is memory of the profiled process, and changes while it is read: a pointer may lead
anywhere, an object's type is checked before it is used, and every length has a limit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from sonde.resolve.lru_cache import LruCache
from sonde.unwind.process_memory import Memory, read_exactly
from sonde.unwind.v8_layout import V8Layout

MAX_NAME: Final = 256
"""Characters of a name; the rest is left out."""
MAX_PARTS: Final = 32
"""Of one text that V8 has put together of others (cons strings); the rest is left out."""
MAX_TYPES: Final = 4096
MAX_TABLE_BYTES: Final = 1 << 16
"""Of a table of positions."""
HEAD_BYTES: Final = 320
"""What is read of a string or an array at first: most are shorter, so that one reading is
enough."""
HEADER_BYTES: Final = 16
"""Of an array or a string: what follows is its content."""
_SEQUENTIAL, _CONS, _EXTERNAL, _SLICED, _THIN = 0, 1, 2, 3, 5
_ONE_BYTE: Final = 8
_PIECE_BYTES: Final = 1 << 18


class V8Objects:
    """The objects of one V8, by tagged pointer."""

    def __init__(self, layout: V8Layout) -> None:
        self._layout = layout
        self._types: LruCache[int, int] = LruCache(MAX_TYPES)
        """By Map, which V8 does not move."""

    def read(self, memory: Memory, pointer: int, size: int) -> tuple[int, bytes]:
        """(type, first `size` bytes at the most) of an object. Raises OSError, ValueError."""
        if pointer & 3 != 1:
            raise ValueError("no pointer to an object")
        raw = memory.read_at(size, pointer - 1)
        (map_,) = struct.unpack_from("<Q", raw) if len(raw) >= 8 else (0,)
        type_ = self._types.get(map_)
        if type_ is None:
            if map_ & 3 != 1:
                raise ValueError("an object without a map")
            at = map_ - 1 + self._layout.instance_type
            type_ = int.from_bytes(read_exactly(memory, 2, at), "little")
            self._types.put(map_, type_)
        return type_, raw

    def read_as(self, memory: Memory, pointer: int, size: int, type_: int) -> bytes:
        """`size` bytes of an object of this type. Raises OSError, ValueError."""
        found, raw = self.read(memory, pointer, size)
        if found != type_ or len(raw) != size:
            raise ValueError("an object of another type")
        return raw

    def forget_types(self) -> None:
        """Read the types again."""
        self._types = LruCache(MAX_TYPES)

    def text(self, memory: Memory, pointer: int, limit: int = MAX_NAME) -> str:
        """A string, cut at `limit` characters. Raises OSError, ValueError."""
        parts = self.parts(memory, pointer, limit)
        return "".join(raw.decode(code, "replace") for raw, code in parts)[:limit]

    def parts(self, memory: Memory, pointer: int, limit: int) -> Iterator[tuple[bytes, str]]:
        """The characters of a string in pieces, each with its encoding (latin-1 or utf-16-le)."""
        layout, left = self._layout, limit
        waiting = [(pointer, 0, limit)]
        for _ in range(MAX_PARTS):
            if not waiting or left <= 0:
                return
            pointer, skip, most = waiting.pop()
            type_, raw = self.read(memory, pointer, HEAD_BYTES)
            if type_ >= layout.first_other or len(raw) < 32:
                raise ValueError("no string")
            (length,) = struct.unpack_from("<i", raw, layout.length)
            first, second = struct.unpack_from("<QQ", raw, HEADER_BYTES)
            kind = type_ & 7
            most = min(most, left, max(length - skip, 0))
            if kind == _THIN:
                waiting.append((first, skip, most))
            elif kind == _SLICED:
                waiting.append((first, skip + (second >> 32), most))
            elif kind == _CONS:
                waiting += [(second, 0, most), (first, 0, most)]
            elif kind in (_SEQUENTIAL, _EXTERNAL):
                width = 1 if type_ & _ONE_BYTE else 2
                at = (second if kind == _EXTERNAL else pointer - 1 + HEADER_BYTES) + width * skip
                left -= most
                for piece in self._pieces(memory, raw, pointer - 1, at, width * most):
                    yield piece, "latin-1" if width == 1 else "utf-16-le"
            else:
                raise ValueError("no string")

    @staticmethod
    def _pieces(memory: Memory, raw: bytes, base: int, at: int, size: int) -> Iterator[bytes]:
        if base <= at and at + size <= base + len(raw):
            yield raw[at - base :][:size]
            return
        while size > 0:
            piece = read_exactly(memory, min(size, _PIECE_BYTES), at)
            yield piece
            at += len(piece)
            size -= len(piece)

    def byte_array(self, memory: Memory, pointer: int) -> bytes:
        """The content of an array of bytes. Raises OSError, ValueError."""
        _, raw = self.read(memory, pointer, HEAD_BYTES)
        (size,) = struct.unpack_from("<q", raw, 8)
        size >>= 32
        if not 0 <= size <= MAX_TABLE_BYTES:
            raise ValueError("a table that is too long")
        if HEADER_BYTES + size <= len(raw):
            return raw[HEADER_BYTES:][:size]
        return read_exactly(memory, size, pointer - 1 + HEADER_BYTES)


def position_at(table: bytes, code_offset: int) -> int:
    """The source position of an instruction, by V8's table of them (its
    src/codegen/source-position-table.cc); 0 unknown.

    `code_offset`: bytes from the first instruction (of bytecode: from the first bytecode) on. The
    result is V8's SourcePosition (source-position.h): 1 for what is not JavaScript, else
    2 * (1 + offset in the script in characters) + (number of an inlined call << 31).

    An entry has two numbers, zigzag-encoded: how far the code offset and the position are from
    those of the entry before. The sign of the first is a flag, whether a statement begins here: a
    negative one stands for -number - 1.
    """
    at, here, position, best = 0, -1, 0, 0
    while at < len(table):
        step, at = _signed(table, at)
        here += step if step >= 0 else -step - 1
        if here > code_offset:
            break
        step, at = _signed(table, at)
        position += step
        best = position & (1 << 64) - 1
    return best


def unsigned(table: bytes, at: int) -> tuple[int, int]:
    """A number of 7 bits a byte (LEB128), and where it ends."""
    value = shift = 0
    while at < len(table) and shift < 70:
        byte = table[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return value, at


def _signed(table: bytes, at: int) -> tuple[int, int]:
    """The same of a number with a sign: zigzag, so that 0, 1, 2, 3 stand for 0, -1, 1, -2."""
    value, at = unsigned(table, at)
    return value >> 1 ^ -(value & 1), at
