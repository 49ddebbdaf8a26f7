# SPDX-License-Identifier: Apache-2.0
"""A small heap as CPython 3.10 to 3.14 has it: an interpreter whose `threading` has threads."""

from __future__ import annotations

import struct
from collections.abc import Sequence

RUNTIME = 0x10
"""Address of _PyRuntime; the first byte of the heap has address 0."""
STATE = {10: (40, 856), 11: (48, 888), 12: (48, 944), 13: (16, 8), 14: (16, 8)}
"""Offsets of the main interpreter and of sys.modules; from 3.13 on as tests publish them."""
_TYPE_BYTES = 896


class Heap:
    """Objects one behind the other."""

    def __init__(self, minor: int) -> None:
        self.minor = minor
        self.raw = bytearray(1024)
        self._dict, self._str, self._int = (self._type(1 << bit) for bit in (29, 28, 24))

    def put(self, raw: bytes) -> int:
        """Add an object; its address."""
        at = len(self.raw)
        self.raw += raw + bytes(-len(raw) % 16)
        return at

    def _type(self, flags: int, offset: int = 0, keys: int = 0) -> int:
        raw = bytearray(_TYPE_BYTES)
        struct.pack_into("<Q", raw, 168, flags)
        struct.pack_into("<q", raw, 288, offset)
        struct.pack_into("<Q", raw, 872 if self.minor == 11 else 880, keys)
        return self.put(bytes(raw))

    def text(self, text: str) -> int:
        """A str, ASCII or not."""
        is_ascii, raw = text.isascii(), text.encode("latin-1", "replace")
        state = 1 << 2 | 1 << 5 | is_ascii << 6
        head = struct.pack("<QQqqI4x", 1, self._str, len(raw), -1, state)
        begin = (40, 56) if self.minor >= 12 else (48, 72)
        return self.put(head + bytes(begin[not is_ascii] - len(head)) + raw)

    def number(self, value: int) -> int:
        """An int of one digit."""
        size = 1 << 3 if self.minor >= 12 else 1
        return self.put(struct.pack("<QQqI4x", 1, self._int, size, value))

    def keys(self, entries: Sequence[tuple[int, int]], kind: int = 1) -> int:
        """Keys of a dict; `kind` as in dk_kind."""
        if self.minor == 10:
            head = struct.pack("<5q8x", 1, 8, 0, 0, len(entries))
        else:
            head = struct.pack("<QBBBxIqq8x", 1, 3, 3, kind, 0, 0, len(entries))
        words = [(0, *pair) if self.minor == 10 or not kind else pair for pair in entries]
        return self.put(head + b"".join(struct.pack(f"<{len(it)}Q", *it) for it in words))

    def dict(self, entries: Sequence[tuple[int, int]], kind: int = 1) -> int:
        """A dict without shared keys."""
        head = (1, self._dict, len(entries), 0, self.keys(entries, kind), 0)
        return self.put(struct.pack("<6Q", *head))

    def thread(self, name: int, tid: int, names: tuple[int, int]) -> int:
        """A threading.Thread, with its attributes as its class usually keeps them. `names`: the
        texts "_name" and "_native_id"."""
        shared = self.keys([(it, 0) for it in names], kind=2)
        if self.minor == 10:
            type_ = self._type(0, offset=16)
            values = self.put(struct.pack("<2Q", name, tid))
            instance = self.put(struct.pack("<6Q", 1, self._dict, 2, 0, shared, values))
            return self.put(struct.pack("<4Q", 1, type_, instance, 0))
        type_ = self._type(1 << 4 | (1 << 2 if self.minor > 12 else 0), keys=shared)
        before, inline = (0, 0, 0, 0), struct.pack("<4B4x2Q", 2, 2, 1, 1, name, tid)
        if self.minor < 13:
            values = self.put(struct.pack("<2Q", name, tid))
            before = (values, 0, 0, 0) if self.minor == 11 else (0, values - 1, 0, 0)
        return self.put(struct.pack("<6Q", *before, 1, type_) + inline) + 32


def heap(minor: int, names: Sequence[str]) -> bytes:
    """The memory of a process with threads of these names, numbered from 101 on."""
    made = Heap(minor)
    attributes = made.text("_name"), made.text("_native_id")
    threads = [
        (made.number(n), made.thread(made.text(name), made.number(n), attributes))
        for n, name in enumerate(names, 101)
    ]
    active = made.dict(threads, kind=0)
    module = made.put(struct.pack("<3Q", 1, 0, made.dict([(made.text("_active"), active)])))
    other = made.put(struct.pack("<3Q", 1, 0, 0))
    modules = made.dict([(made.text("sys"), other), (made.text("threading"), module)])
    main, of_modules = STATE[minor]
    interpreter = made.put(bytes(of_modules) + struct.pack("<Q", modules))
    struct.pack_into("<Q", made.raw, RUNTIME + main, interpreter)
    return bytes(made.raw)
