# SPDX-License-Identifier: Apache-2.0
"""A bounded dictionary that evicts approximately the least recently used entries."""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """An approximate LRU cache of two generations. A hit costs one dictionary lookup.

    New entries go into the young generation. When it is full, it becomes the old one, and the
    former old one is dropped. A hit in the old generation moves the entry to the young one. So the
    cache holds at least the last `limit / 2` different keys used, and at most `limit` entries.
    """

    __slots__ = ("_half", "_old", "_young", "evicted")

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}
        self.evicted = 0
        """Entries dropped so far."""

    def get(self, key: K) -> V | None:
        """The value; None where the key is unknown or was evicted."""
        value = self._young.get(key)
        if value is None and self._old:
            value = self._old.pop(key, None)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: K, value: V) -> None:
        """Add the entry, or replace it."""
        self._old.pop(key, None)
        if len(self._young) >= self._half and key not in self._young:
            self.evicted += len(self._old)
            self._old, self._young = self._young, {}
        self._young[key] = value

    def __len__(self) -> int:
        return len(self._young) + len(self._old)
