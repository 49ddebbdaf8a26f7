# SPDX-License-Identifier: Apache-2.0
"""The names that a Python program gives its threads, in the memory of a hostile process."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from cpython_heap import RUNTIME
from data import Data
from sonde.unwind.cpython import FoundInterpreter, interpreter
from sonde.unwind.python_objects import MAX_BYTES, MAX_READS
from sonde.unwind.python_threads import FAILURES, MAX_NAME, MAX_THREADS, PythonThreads

_OFFSETS = 77


class _Memory:
    """The memory, of which every part is there."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self.reads = self.bytes = 0

    def read_many(self, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        self.reads += len(parts)
        self.bytes += sum(size for size, _ in parts)
        return [self._raw[at : at + size] for size, at in parts]


def one(raw: bytes) -> None:
    """Read the names twice: where the table of threads is not known yet, and where it is."""
    data = Data(raw)
    version = 3 << 24 | (10 + data.byte() % 5) << 16
    published = b"xdebugpy" + struct.pack("<79Q", version, 0, *[8] * _OFFSETS)
    found = FoundInterpreter(version, 0x1000, 0x2000, (1, 2, 0, 0), published)
    threads = PythonThreads(interpreter(found, ""), RUNTIME)
    content = data.rest()
    for _ in range(2):
        memory = _Memory(content)
        try:
            names = threads.read(memory)
        except FAILURES:
            continue
        finally:
            assert memory.reads <= 2 * MAX_READS and memory.bytes <= 2 * MAX_BYTES
        assert len(names) <= MAX_THREADS and 0 not in names
        assert all(name.isprintable() and len(name) <= MAX_NAME for name in names.values())
