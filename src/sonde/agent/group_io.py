# SPDX-License-Identifier: Apache-2.0
"""Block I/O by control group: joins what a collector counts by number with the group's path."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sonde.collect.collector import Batch
from sonde.metrics import MetricRow, labels

SERIES = (
    ("sonde.cgroup.disk.operations", 1.0),
    ("sonde.cgroup.disk.io", 1.0),
    ("sonde.cgroup.disk.queue_time", 1e9),
    ("sonde.cgroup.disk.device_time", 1e9),
)
"""Of the four sums in `Batch.group_io`, and their unit in those of the series."""
MAX_SERIES = 4_096
"""Groups times devices times directions; beyond it all groups are one, other."""


class GroupIo:
    """Cumulative counters, from when it was made."""

    def __init__(self, path_of: Callable[[int, int], str | None]) -> None:
        """`path_of` (hierarchy, number) names a control group."""
        self._path_of = path_of
        self._sums: dict[str, list[int]] = {}

    def rows(self, batch: Batch, time_ns: int) -> Iterator[MetricRow]:
        """Rows of `metric` for the groups that did something."""
        touched = set()
        for (hierarchy, number, device, operation), sums in batch.group_io.items():
            path = self._path_of(hierarchy, number) or ("" if number == 0 else "unknown")
            label = _label(path, device, operation)
            if label not in self._sums and len(self._sums) >= MAX_SERIES:
                label = _label("other", device, operation)
            total = self._sums.setdefault(label, [0, 0, 0, 0])
            for i, value in enumerate(sums):
                total[i] += value
            touched.add(label)
        for label in sorted(touched):
            for (series, unit), value in zip(SERIES, self._sums[label], strict=True):
                yield time_ns, series, label, value / unit


def _label(path: str, device: str, operation: str) -> str:
    return labels(sonde__cgroup=path, system__device=device, disk__io__direction=operation)
