# SPDX-License-Identifier: Apache-2.0
"""Equal texts as one object, within a bound.

Names and paths come again and again, and other programs choose them. sys.intern() is not for these:
on CPython 3.12 what was interned once is kept until the process ends, so a program with endless
names would make an agent grow without bound.
"""

from __future__ import annotations

from sys import getsizeof
from typing import Final

MAX_BYTES: Final = 4 << 20
"""Of the texts that are known at a time; those used last are kept, as in LruCache."""


class SharedTexts:
    """Returns for each text the equal one that it was given before, as far as it is still known."""

    __slots__ = ("_bytes", "_half_bytes", "_old", "_young")

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._half_bytes = max_bytes // 2
        self._young: dict[str, str] = {}
        self._old: dict[str, str] = {}
        self._bytes = 0
        """Of the young ones."""

    def __call__(self, text: str) -> str:
        """The text, as one object."""
        known = self._young.get(text)
        if known is not None:
            return known
        known = self._old.pop(text, text)
        size = getsizeof(known)
        if self._bytes + size > self._half_bytes:
            self._old, self._young, self._bytes = self._young, {}, 0
        self._young[known] = known
        self._bytes += size
        return known

    @property
    def bytes(self) -> int:
        """Of all texts that are known now."""
        return sum(map(getsizeof, (*self._young, *self._old)))


shared: Final = SharedTexts()
"""For names of code and paths of files."""
