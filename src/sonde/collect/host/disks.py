# SPDX-License-Identifier: Apache-2.0
"""Block devices: operations, bytes, time: /proc/diskstats (admin-guide/iostats)."""

from __future__ import annotations

from collections.abc import Sequence

from sonde import procfs
from sonde.collect.host.files import Counters, KernelFile, labels
from sonde.collect.polling import NORMAL_S, Points, Poll, SourceUnavailable

SECTOR_BYTES = 512
MAX_DEVICES = 256
"""Those that come first in the file."""


class Disks:
    """What block devices did, of those that ever did anything."""

    name = "disks"

    def __init__(self) -> None:
        self._file = KernelFile("/proc/diskstats")
        self._counters = Counters()

    def open(self) -> None:
        """Check that it can be read. Raises SourceUnavailable."""
        if not self._file.read():
            raise SourceUnavailable("this machine has no block device", whole=True)

    def polls(self) -> Sequence[Poll]:
        """One poll."""
        return [Poll("stats", NORMAL_S, self._read)]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self, points: Points) -> None:
        devices = 0
        for line in self._file.read().split(b"\n"):
            words = line.split()
            if len(words) < 14 or not any(word != b"0" for word in words[3:]):
                continue
            devices += 1
            if devices > MAX_DEVICES:
                return
            self._report(points, procfs.text(words[2]), list(map(int, words[3:14])))

    def _report(self, points: Points, device: str, stat: list[int]) -> None:
        report = self._counters.report
        for direction, first in (("read", 0), ("write", 4)):
            done, merged, sectors, spent_ms = stat[first : first + 4]
            label = labels(system__device=device, disk__io__direction=direction)
            report(points, "system.disk.operations", done, label)
            report(points, "system.disk.merged", merged, label)
            report(points, "system.disk.io", sectors * SECTOR_BYTES, label)
            report(points, "system.disk.operation_time", spent_ms / 1000, label)
        in_flight, busy_ms, _weighted = stat[8:11]
        label = labels(system__device=device)
        report(points, "system.disk.io_time", busy_ms / 1000, label)
        report(points, "sonde.host.disk.in_flight", in_flight, label)
