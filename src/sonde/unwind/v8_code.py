# SPDX-License-Identifier: Apache-2.0
"""Where in its source the compiled code of a JavaScript function is, as V8's Code has it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from sonde.resolve.lru_cache import LruCache
from sonde.unwind.v8_functions import TRUST_NS, V8Function, V8Functions, line_of
from sonde.unwind.v8_layout import Memory, V8Layout
from sonde.unwind.v8_objects import HEADER_BYTES, position_at

MAX_CODES: Final = 2_048
MAX_INLINED: Final = 16
"""Calls that were inlined into one another."""
MAX_FUNCTIONS: Final = 1_024
"""That were inlined into one function."""
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
        code = self._known.get(at)
        if code is None or now_ns > code.read_ns + TRUST_NS:
            try:
                code = self._read(memory, at, now_ns)
            except (ValueError, OSError, struct.error):
                return [(function, function.line)]
            self._known.put(at, code)
        inside = (place - code.start) & 0xFFFFFFFF
        if inside >= code.size:
            return [(function, function.line)]
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
        if length <= layout.inlined_calls or len(words) <= layout.inlined_calls:
            return b"", b""
        count = words[layout.inlined_count] >> 32
        if not 0 < count <= MAX_FUNCTIONS:
            return b"", b""
        calls = objects.byte_array(memory, words[layout.inlined_calls])
        literals = words[layout.literals]
        _, raw = objects.read(memory, literals, HEADER_BYTES + 8 * count)
        return calls, raw[HEADER_BYTES:]
