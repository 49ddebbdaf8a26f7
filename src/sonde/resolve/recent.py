# SPDX-License-Identifier: Apache-2.0
"""A bounded dictionary that keeps what was used of late, at the price of a plain lookup."""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Two dictionaries, young and old. When the young one is full it becomes the old one, and what
    is left in the old one is dropped; a hit in the old one makes its entry young again. So it holds
    at least the last `limit / 2` different keys used, and at most `limit` entries.
    """

    __slots__ = ("_half", "_old", "_young", "evicted")

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}
        self.evicted = 0

    def get(self, key: K) -> V | None:
        """The value, None where it is unknown or was dropped."""
        value = self._young.get(key)
        if value is None and self._old:
            value = self._old.pop(key, None)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: K, value: V) -> None:
        """Keep it, in place of what stood there."""
        self._old.pop(key, None)
        if len(self._young) >= self._half and key not in self._young:
            self.evicted += len(self._old)
            self._old, self._young = self._young, {}
        self._young[key] = value

    def __len__(self) -> int:
        return len(self._young) + len(self._old)
