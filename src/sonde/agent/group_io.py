# SPDX-License-Identifier: Apache-2.0
"""Block I/O by control group: a collector counts by the group's number, metrics have its path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from sonde.collect.collector import Batch
from sonde.metrics import MetricRow, labels
from sonde.sinks.plain_series import FORGOTTEN_AFTER_S
from sonde.sinks.shares import SharedTable

SERIES = (
    ("sonde.cgroup.disk.operations", 1.0),
    ("sonde.cgroup.disk.io", 1.0),
    ("sonde.cgroup.disk.queue_time", 1e9),
    ("sonde.cgroup.disk.device_time", 1e9),
)
"""Series of the four sums in `Batch.group_io`, and how many of a sum's unit are one of the series'
(1e9 ns in a second)."""
MAX_SUMS = 1_536
"""Combinations of group, device and direction, shared between parties; what finds no room is summed
as the group `other`."""
OTHER = "other"


@dataclass(slots=True)
class _Sums:
    totals: list[int] = field(default_factory=lambda: [0] * len(SERIES))
    time_ns: int = 0
    """When the group did I/O last (CLOCK_MONOTONIC)."""


class GroupIo:
    """Counters of each group's I/O since this object was made."""

    def __init__(
        self, path_of: Callable[[int, int], str | None], party_of: Callable[[str], str]
    ) -> None:
        """`path_of`: the path of a control group by (hierarchy, number); `party_of`: its party by
        path."""
        self._path_of = path_of
        self._party_of = party_of
        self._forgot_ns = 0
        self._sums: SharedTable[str, _Sums] = SharedTable(MAX_SUMS)
        self._others: dict[str, _Sums] = {}
        """By labels: I/O of no known group (of the root, `unknown`), and of all that found no
        room."""

    def rows(self, batch: Batch, time_ns: int) -> Iterator[MetricRow]:
        """Rows of `metric` for the groups that did I/O in this batch."""
        touched = {}
        for (hierarchy, number, device, operation), sums in batch.group_io.items():
            path = self._path_of(hierarchy, number) or ("" if number == 0 else "unknown")
            label, total = self._of(path, device, operation, time_ns)
            total.time_ns = time_ns
            for i, value in enumerate(sums):
                total.totals[i] += value
            touched[label] = total
        for label, total in sorted(touched.items(), key=itemgetter(0)):
            for (series, unit), value in zip(SERIES, total.totals, strict=True):
                yield time_ns, series, label, value / unit

    def _of(self, path: str, device: str, operation: str, time_ns: int) -> tuple[str, _Sums]:
        label = _label(path, device, operation)
        known = self._sums.get(label) or self._others.get(label)
        if known is not None:
            return label, known
        party = self._party_of(path)
        if path.startswith("/"):
            if not self._sums.has_room(party):
                self._forget(time_ns)
            if self._sums.has_room(party):
                known = _Sums()
                self._sums.add(party, label, known)
                return label, known
            label = _label(OTHER, device, operation)
        return label, self._others.setdefault(label, _Sums())

    def _forget(self, now_ns: int) -> None:
        """Drop groups without I/O for so long that the page of metrics has dropped their series."""
        if now_ns - self._forgot_ns > FORGOTTEN_AFTER_S * 1e9:
            self._forgot_ns = now_ns
            self._sums.remove_all(lambda it: now_ns - it.time_ns > FORGOTTEN_AFTER_S * 1e9)


def _label(path: str, device: str, operation: str) -> str:
    return labels(sonde__cgroup=path, system__device=device, disk__io__direction=operation)
