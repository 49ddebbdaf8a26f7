# SPDX-License-Identifier: Apache-2.0
"""Bytes of an input as values, and as files that readers open by their path."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")

EDGES: Final = (
    *(0, 1, 2, 3, 7, 99, 255, 4096, 65_535, (1 << 31) - 1, 1 << 31, (1 << 32) - 1),
    *((1 << 53) + 1, (1 << 62), (1 << 63) - 1, (1 << 64) - 1),
)
FLOATS: Final = (0.0, 1.0, -1.0, 0.5, 1e300, -1e300, 5e-324, float("nan"), float("inf"), -0.0)


class Data:
    """Consumes an input from its front; where nothing is left, every value is 0 or empty."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes not consumed yet."""
        return len(self._raw) - self._at

    def bytes(self, count: int) -> bytes:
        """Up to `count` bytes."""
        taken = self._raw[self._at : self._at + count]
        self._at += len(taken)
        return taken

    def byte(self) -> int:
        """One byte."""
        taken = self.bytes(1)
        return taken[0] if taken else 0

    def part(self) -> bytes:
        """Bytes behind their length, which has two bytes."""
        return self.bytes(self.byte() | self.byte() << 8)

    def rest(self) -> bytes:
        """All that is left."""
        return self.bytes(self.left)

    def pick(self, choices: tuple[T, ...]) -> T:
        """One of some choices."""
        return choices[self.byte() % len(choices)]

    def number(self, bits: int) -> int:
        """Of `bits` bits: small, at an edge, or any."""
        head = self.byte()
        if head < 128:
            return head & ((1 << bits) - 1)
        if head < 192:
            return EDGES[head % len(EDGES)] & ((1 << bits) - 1)
        return int.from_bytes(self.bytes(bits // 8), "little")

    def real(self) -> float:
        """A floating-point number: small, at an edge, or any."""
        head = self.byte()
        if head < 128:
            return head / 4
        if head < 192:
            return FLOATS[head % len(FLOATS)]
        return float(struct.unpack("<d", self.bytes(8).ljust(8, b"\0"))[0])

    def text(self, known: tuple[str, ...]) -> str:
        """One of the known ones most of the time, else any text of up to 63 bytes."""
        head = self.byte()
        if head < 192:
            return known[head % len(known)]
        return self.bytes(head & 63).decode("utf-8", "replace")


class MemoryFile:
    """One file in memory for all inputs: to make one for each costs as much as reading it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("input", os.MFD_CLOEXEC)
        self.path = Path(f"/proc/self/fd/{self.fd}")

    def holding(self, raw: bytes, length: int = 0) -> Path:
        """Its path, once it holds these bytes and after them a hole up to `length`."""
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, raw, 0)
        os.ftruncate(self.fd, max(length, len(raw)))
        return self.path
