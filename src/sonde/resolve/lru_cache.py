# SPDX-License-Identifier: Apache-2.0
"""A bounded dictionary that evicts approximately the least recently used entries."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """An approximate LRU cache of two generations. A hit costs one dictionary lookup.

    New entries go into the young generation. When it is full, it becomes the old one, and the
    former old one is dropped. A hit in the old generation moves the entry to the young one. So the
    cache holds at least the last `limit / 2` different keys used, and at most `limit` entries. With
    a size of values it holds at most `most_bytes`, and one value more.
    """

    __slots__ = (
        *("_half", "_half_bytes", "_old", "_old_bytes", "_size_of", "_young", "_young_bytes"),
        "evicted",
    )

    def __init__(
        self,
        limit: int,
        most_bytes: float = math.inf,
        size_of: Callable[[V], int] = lambda _: 0,
    ) -> None:
        """`size_of`: memory of a value, which does not change while it is here."""
        self._half = max(1, limit // 2)
        self._half_bytes = most_bytes / 2
        self._size_of = size_of
        self._young_bytes = self._old_bytes = 0
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}
        self.evicted = 0
        """Entries dropped so far."""

    def get(self, key: K) -> V | None:
        """The value; None where the key is unknown or was evicted."""
        value = self._young.get(key)
        if value is None and self._old:
            value = self._old.get(key)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: K, value: V) -> None:
        """Add the entry, or replace it."""
        size_of = self._size_of
        if key in self._young:
            self._young_bytes -= size_of(self._young.pop(key))
        elif key in self._old:
            self._old_bytes -= size_of(self._old.pop(key))
        if len(self._young) >= self._half or self._young_bytes >= self._half_bytes:
            self.evicted += len(self._old)
            self._old, self._young = self._young, {}
            self._old_bytes, self._young_bytes = self._young_bytes, 0
        self._young[key] = value
        self._young_bytes += size_of(value)

    @property
    def bytes(self) -> int:
        """Memory of all values, by `size_of`."""
        return self._young_bytes + self._old_bytes

    def __len__(self) -> int:
        return len(self._young) + len(self._old)
