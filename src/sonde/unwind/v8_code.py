# SPDX-License-Identifier: Apache-2.0
"""Where in its source the compiled code of a JavaScript function is, as V8's Code has it."""

from __future__ import annotations

import struct
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sonde.resolve.lru_cache import LruCache
from sonde.unwind.process_memory import Memory
from sonde.unwind.v8_functions import TRUST_NS, V8Function, V8Functions, line_of
from sonde.unwind.v8_layout import FAILURES, V8Layout
from sonde.unwind.v8_objects import HEADER_BYTES, position_at

MAX_CODES: Final = 2_048
MAX_INLINED: Final = 16
"""Calls that were inlined into one another."""
MAX_FUNCTIONS: Final = 1_024
"""That were inlined into one function."""
MAX_CODE_BYTES: Final = 1 << 16
"""Of a function's instructions, before which its Code is looked for."""
_PIECE_BYTES: Final = 1 << 13
_MAX_TRIES: Final = 8
_ALIGNED: Final = 32
_CODE_BYTES: Final = 160
_KIND: Final = 15
_CALL_BYTES: Final = 16
"""Of an inlined call: where it is (u64), which function is called (i32)."""


@dataclass(frozen=True, slots=True)
class _Code:
    start: int
    """Of its instructions, 32 bits."""
    size: int
    positions: bytes
    calls: bytes
    """Those that were inlined."""
    functions: bytes
    """Addresses of those that are called there."""
    read_ns: int


class V8Codes:
    """The compiled code of one V8, by address of its Code."""

    def __init__(self, layout: V8Layout, functions: V8Functions) -> None:
        self._layout = layout
        self._functions = functions
        self._known: LruCache[int, _Code] = LruCache(MAX_CODES)
        self._drops = 0
        self._starts: list[tuple[int, int]] = []
        """(first instruction, address of its Code) of what was found by its instructions."""
        self.generated: Sequence[tuple[int, int]] = ()
        """Start and end of the memory that generated code is in."""

    def calls_at(
        self, memory: Memory, function: V8Function, at: int, place: int, now_ns: int
    ) -> list[tuple[V8Function, int]]:
        """(function, line) at an instruction, whose address has `place` as its lower half: those
        that were inlined, from the innermost on, and `function`.

        The line is that of the function's begin where this Code is not the one that runs, or V8 has
        kept no positions. Raises OSError.
        """
        if self._drops != self._functions.drops:
            self._known, self._drops = LruCache(MAX_CODES), self._functions.drops
            self._starts = []
        code = self._code_at(memory, at, place, now_ns) if self._layout.has_code else None
        if code is None:
            code = self._code_of(memory, place, now_ns)
        if code is None:
            return [(function, function.line)]
        inside = (place - code.start) & 0xFFFFFFFF
        position = position_at(code.positions, inside)
        found: list[tuple[V8Function, int]] = []
        before = 1 << 16
        while 0 < (call := position >> 31 & 0xFFFF) < before and len(found) < MAX_INLINED:
            row = code.calls[_CALL_BYTES * (call - 1) :][:_CALL_BYTES]
            if len(row) < _CALL_BYTES:
                break
            outer, number = struct.unpack_from("<Qi", row)
            if 0 <= number < len(code.functions) // 8:
                (pointer,) = struct.unpack_from("<Q", code.functions, 8 * number)
                inlined = self._functions.find(memory, pointer & ~7, now_ns)
                if inlined is not None:
                    found.append((inlined, line_of(inlined, position)))
            position, before = outer, call  # a call is inlined after the one around it
        found.append((function, line_of(function, position)))
        return found

    def _code_at(self, memory: Memory, at: int, place: int, now_ns: int) -> _Code | None:
        """The Code at an address, if it has the instruction."""
        code = self._known.get(at)
        if code is None or now_ns > code.read_ns + TRUST_NS:
            try:
                code = self._read(memory, at, now_ns)
            except FAILURES:
                return None
            self._known.put(at, code)
        return code if (place - code.start) & 0xFFFFFFFF < code.size else None

    def _code_of(self, memory: Memory, place: int, now_ns: int) -> _Code | None:
        """The Code of an instruction, found by what lies before the first one: where a function was
        replaced in the middle of a loop, its JSFunction leads to another Code."""
        for low, high in self.generated:
            pc = low + ((place - low) & 0xFFFFFFFF)
            if pc >= high:
                continue
            index = bisect_right(self._starts, (pc, 1 << 64)) - 1
            if index >= 0:
                code = self._code_at(memory, self._starts[index][1], place, now_ns)
                if code is not None:
                    return code
            try:
                return self._search(memory, low, pc, now_ns)
            except FAILURES:
                return None
        return None

    def _search(self, memory: Memory, low: int, pc: int, now_ns: int) -> _Code | None:
        before, tries = self._layout.code_before, 0
        first = pc & -_ALIGNED
        end = max(low + before + 8, pc - MAX_CODE_BYTES)
        while first >= end:
            from_ = max(first - _PIECE_BYTES, end) - before - 8
            raw = memory.read_at(first - from_, from_)
            words = struct.unpack(f"<{len(raw) // 8}Q", raw[: len(raw) & -8])
            while first - before - 8 >= from_ and first >= end:
                index = (first - before - from_) // 8
                if index >= len(words):
                    return None
                # Instructions that are an object: its map, and a pointer to Code. Up to V8 11.1
                # they are part of Code.
                map_, pointer = words[index - 1], words[index]
                if not self._layout.has_address:
                    map_, pointer = pointer, first - before + 1
                if _is_object(map_) and _is_object(pointer):
                    code = self._code_at(memory, pointer - 1, pc & 0xFFFFFFFF, now_ns)
                    if code is not None and code.start == first & 0xFFFFFFFF:
                        if len(self._starts) >= MAX_CODES:
                            self._starts = []
                        insort(self._starts, (first, pointer - 1))
                        return code
                    tries += 1
                    if tries >= _MAX_TRIES:
                        return None
                first -= _ALIGNED
        return None

    def _read(self, memory: Memory, at: int, now_ns: int) -> _Code:
        layout, objects = self._layout, self._functions.objects
        raw = objects.read_as(memory, at | 1, _CODE_BYTES, layout.of_code)
        start = at + layout.instruction_start
        if layout.has_address:
            (start,) = struct.unpack_from("<Q", raw, layout.instruction_start)
        (size,) = struct.unpack_from("<i", raw, layout.instruction_size)
        (kind,) = struct.unpack_from("<I", raw, layout.code_kind)
        (table,) = struct.unpack_from("<Q", raw, layout.code_positions)
        positions = calls = functions = b""
        if kind & _KIND != layout.baseline:  # Sparkplug's leads to bytecode
            positions = objects.byte_array(memory, table)
            (data,) = struct.unpack_from("<Q", raw, layout.code_positions - 8)
            calls, functions = self._inlined(memory, data)
        self._functions.keep(len(positions) + len(calls) + len(functions))
        return _Code(start & 0xFFFFFFFF, max(size, 0), positions, calls, functions, now_ns)

    def _inlined(self, memory: Memory, data: int) -> tuple[bytes, bytes]:
        """Of the data by which code is undone: an array of numbers and pointers."""
        layout, objects = self._layout, self._functions.objects
        _, raw = objects.read(memory, data, HEADER_BYTES + 8 * 16)
        words = struct.unpack(f"<{(len(raw) - HEADER_BYTES) // 8}Q", raw[HEADER_BYTES:])
        length = struct.unpack_from("<q", raw, 8)[0] >> 32
        last = max(layout.inlined_count, layout.inlined_calls, layout.literals)
        if length <= last or len(words) <= last:
            return b"", b""
        count = words[layout.inlined_count] >> 32
        if not 0 < count <= MAX_FUNCTIONS:
            return b"", b""
        calls = objects.byte_array(memory, words[layout.inlined_calls])
        literals = words[layout.literals]
        _, raw = objects.read(memory, literals, HEADER_BYTES + 8 * count)
        return calls, raw[HEADER_BYTES:]


def _is_object(word: int) -> bool:
    return word & 3 == 1 and 1 << 16 < word < 1 << 47
