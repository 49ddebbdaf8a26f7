# SPDX-License-Identifier: Apache-2.0
"""Which source line a place in the compiled code of a JavaScript function is of, by V8's Code."""

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
"""Depth of calls that were inlined into one another."""
MAX_FUNCTIONS: Final = 1_024
"""Functions that were inlined into one."""
MAX_CODE_BYTES: Final = 1 << 16
"""Of a function's instructions, back to the first of which its Code is searched."""
_PIECE_BYTES: Final = 1 << 13
"""Read at once in that search."""
_MAX_TRIES: Final = 8
"""Candidates that are checked in it."""
_ALIGNED: Final = 32
"""To this many bytes the first instruction is aligned."""
_CODE_BYTES: Final = 160
"""Of a Code: all fields that are read."""
_KIND: Final = 15
"""Bits of a Code's flags."""
_CALL_BYTES: Final = 16
"""Of an inlined call: where it is (u64), which function is called (i32)."""


@dataclass(frozen=True, slots=True)
class _Code:
    start: int
    """Lower 32 bits of the first instruction's address."""
    size: int
    """Bytes of instructions."""
    positions: bytes
    """Table of source positions."""
    calls: bytes
    """Table of the calls that were inlined."""
    functions: bytes
    """Tagged pointers to the functions that are called there."""
    read_ns: int


class V8Codes:
    """The compiled code of one V8, by address of its Code."""

    def __init__(self, layout: V8Layout, functions: V8Functions) -> None:
        self._layout = layout
        self._functions = functions
        self._known: LruCache[int, _Code] = LruCache(MAX_CODES)
        self._drops = 0
        """`drops` of the functions when these were read."""
        self._starts: list[tuple[int, int]] = []
        """(first instruction, address of its Code), sorted, of Codes that `_search` has found."""
        self.generated: Sequence[tuple[int, int]] = ()
        """Start and end of the memory that generated code is in."""

    def forget(self) -> None:
        """Drop all, as the functions were."""
        self._known, self._drops = LruCache(MAX_CODES), self._functions.drops
        self._starts = []

    def calls_at(
        self, memory: Memory, function: V8Function, at: int, place: int, now_ns: int
    ) -> list[tuple[V8Function, int]]:
        """(function, line) at an instruction: those that were inlined, from the innermost on, then
        `function`. `at`: address of its Code; `place`: lower half of the instruction's address.

        The line is the function's first one where the Code that runs is not found, or V8 has kept
        no positions. Raises OSError.
        """
        if self._drops != self._functions.drops:
            self.forget()
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
            position, before = outer, call  # inner calls have higher numbers: no endless loop
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
        """The Code of an instruction, found by what lies before its first one. Needed where V8 has
        replaced the code of a function within a loop (OSR): its JSFunction has another Code."""
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
                # Instructions are an object of their class, with its map and a pointer to Code; up
                # to V8 11.1 they are part of Code.
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
        if kind & _KIND != layout.baseline:  # in Sparkplug's code these words lead to bytecode
            positions = objects.byte_array(memory, table)
            (data,) = struct.unpack_from("<Q", raw, layout.code_positions - 8)
            calls, functions = self._inlined(memory, data)
        self._functions.keep(len(positions) + len(calls) + len(functions))
        return _Code(start & 0xFFFFFFFF, max(size, 0), positions, calls, functions, now_ns)

    def _inlined(self, memory: Memory, data: int) -> tuple[bytes, bytes]:
        """(calls, functions) of `_Code`, from the deoptimization data: an array of numbers and
        pointers."""
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
    """Whether a word may be a tagged pointer."""
    return word & 3 == 1 and 1 << 16 < word < 1 << 47
