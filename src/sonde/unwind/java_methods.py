# SPDX-License-Identifier: Apache-2.0
"""Names and lines of Java methods, read from the memory of a running HotSpot."""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from sonde.procfs.long_texts import short_end, short_name
from sonde.resolve.lru_cache import LruCache
from sonde.unwind.hotspot_layout import HotspotLayout
from sonde.unwind.process_memory import Memory, read_exactly, read_word

MAX_METHODS: Final = 16_384
"""Of one JVM."""
MAX_NAME_BYTES: Final = 512
MAX_LINES_BYTES: Final = 4096
"""Of one line table, as it is in memory; bytecode beyond it gets the last line before."""
MAX_ALL_BYTES: Final = 4 << 20
"""Of names and line tables of one JVM. Beyond it, all are read again when they are needed."""
MAX_LINE: Final = 1 << 16
_METHOD_BYTES: Final = 250
"""Memory of a method beside those."""
TRUST_NS: Final = 10_000_000_000
"""How long a method is used before it is read again: its class may be unloaded."""
_HIDDEN: Final = re.compile(r"[+/.]0x[0-9a-f]+$")
"""End of the name of a hidden class, such as a lambda's: its address, different in every run."""
_SHORT: Final = 192
"""From this on, a byte of a compressed number is not its last (code/compressedStream.hpp)."""


@dataclass(frozen=True, slots=True)
class JavaMethod:
    """One method."""

    name: str
    """package.Class.method"""
    file: str
    """Name of the source file; '' unknown."""
    bytecode: int
    """Address of its first bytecode."""
    bytecode_size: int
    lines: bytes
    """Its line table up to the end mark: decoded, it would take a hundred times as much."""
    skips_zero: bool
    """See `line_table`."""
    read_ns: int

    def line_at(self, bytecode: int) -> int:
        """The line of the bytecode at an address; 0 unknown."""
        index = bytecode - self.bytecode
        if not 0 <= index < self.bytecode_size:
            return 0
        best, line = -1, 0
        for start, number in line_table(self.lines, self.skips_zero):
            if best < start <= index:
                best, line = start, number
        return line

    @property
    def bytes(self) -> int:
        """Memory that it takes, about."""
        return _METHOD_BYTES + sum(sys.getsizeof(it) for it in (self.name, self.file, self.lines))


class JavaMethods:
    """The methods of one JVM, by address of the Method."""

    def __init__(self, layout: HotspotLayout) -> None:
        self._layout = layout
        self._known: LruCache[int, JavaMethod] = LruCache(MAX_METHODS)
        self._bytes = 0
        """Memory of the known ones, and of those evicted since all were last dropped."""
        self.drops = 0
        """How often all were dropped, as they took too much memory."""

    @property
    def held_bytes(self) -> int:
        """Memory of the known ones, at most."""
        return self._bytes

    def forget(self) -> None:
        """Drop all."""
        self._known, self._bytes = LruCache(MAX_METHODS), 0
        self.drops += 1

    def find(self, memory: Memory, at: int, now_ns: int) -> JavaMethod | None:
        """The method at an address, if need be as it was read before; None: it was never read."""
        known = self._known.get(at)
        if known is not None and now_ns < known.read_ns + TRUST_NS:
            return known
        try:
            found = self._read(memory, at, now_ns)
        except (OSError, ValueError, LookupError, ArithmeticError, struct.error):
            return known
        self._bytes += found.bytes - (known.bytes if known is not None else 0)
        if self._bytes > MAX_ALL_BYTES:
            self.forget()
            self._bytes = found.bytes
        self._known.put(at, found)
        return found

    def _read(self, memory: Memory, at: int, now_ns: int) -> JavaMethod:
        layout = self._layout
        const = read_word(memory, at + layout.method_const)
        raw = read_exactly(memory, layout.const_bytes, const)
        (pool,) = struct.unpack_from("<Q", raw, layout.const_constants)
        code_size, name_index, flags = (
            struct.unpack_from("<H", raw, it)[0]
            for it in (layout.const_code_size, layout.const_name, layout.const_flags)
        )
        head = read_exactly(memory, layout.pool_bytes, pool)
        (holder,) = struct.unpack_from("<Q", head, layout.pool_holder)
        (length,) = struct.unpack_from("<i", head, layout.pool_length)
        (source,) = struct.unpack_from("<H", head, layout.pool_source)
        entries = pool + layout.pool_bytes
        if not 0 < name_index < length:
            raise ValueError("a method without a name")
        method = self._symbol(memory, read_word(memory, entries + 8 * name_index))
        owner = self._symbol(memory, read_word(memory, holder + layout.klass_name))
        if not method or not owner:
            raise ValueError("a method without a name")
        file = ""
        if 0 < source < length:
            file = self._symbol(memory, read_word(memory, entries + 8 * source))
        bytecode = const + layout.const_bytes
        lines = b""
        if flags & layout.has_lines:
            table = memory.read_at(MAX_LINES_BYTES, bytecode + code_size)
            end = max((it[2] for it in _entries(table, layout.skips_zero)), default=0)
            lines = table[:end]
        return JavaMethod(
            short_name(f"{_HIDDEN.sub('', owner).replace('/', '.')}.{method}"),
            short_end(file.rpartition("/")[2]),
            bytecode,
            code_size,
            lines,
            layout.skips_zero,
            now_ns,
        )

    def _symbol(self, memory: Memory, at: int) -> str:
        layout = self._layout
        raw = memory.read_at(layout.symbol_body + MAX_NAME_BYTES, at) if at else b""
        (length,) = struct.unpack_from("<H", raw, layout.symbol_length)
        text = raw[layout.symbol_body :][: min(length, MAX_NAME_BYTES)].decode("utf-8", "replace")
        return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def line_table(raw: bytes, skips_zero: bool) -> list[tuple[int, int]]:
    """(index of a bytecode, line) of a compressed line table (oops/method.hpp).

    `skips_zero`: no byte of a number is 0, as from JDK 19 on.
    """
    return [(index, line) for index, line, _ in _entries(raw, skips_zero)]


def _entries(raw: bytes, skips_zero: bool) -> Iterator[tuple[int, int, int]]:
    """(index of a bytecode, line, where the next one is in the table)."""
    at = index = line = 0
    while at < len(raw) and raw[at]:
        first = raw[at]
        at += 1
        if first == 0xFF:
            step, at = _number(raw, at, skips_zero)
            index += step
            step, at = _number(raw, at, skips_zero)
            line += step
        else:
            index += first >> 3
            line += first & 7
        if not 0 <= line < MAX_LINE or index < 0:
            break
        yield index, line, at


def _number(raw: bytes, at: int, skips_zero: bool) -> tuple[int, int]:
    """A signed number in one to five bytes, and where it ends (code/compressedStream.hpp)."""
    least = int(skips_zero)
    value = 0
    for i in range(5):
        byte = raw[at] if at < len(raw) else 0
        at += 1
        value += max(byte - least, 0) << 6 * i
        if byte < _SHORT:
            break
    return value >> 1 ^ -(value & 1), at
