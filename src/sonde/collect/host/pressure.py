# SPDX-License-Identifier: Apache-2.0
"""Pressure of the machine: time in which some, or all, tasks waited for a CPU, memory, a device, or
for interrupts to end (PSI)."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

from sonde.collect.host.files import Counters, KernelFile, labels
from sonde.collect.polling import NORMAL_S, Points, Poll, SourceUnavailable

FOLDER = Path("/proc/pressure")
RESOURCES = ("cpu", "memory", "io", "irq")


class Pressure:
    """PSI of the machine; a kernel without it is a gap with that reason."""

    name = "pressure"

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._files: dict[str, KernelFile] = {}
        self._counters = Counters()
        self._labels: dict[tuple[str, bytes], str] = {}

    def open(self) -> None:
        """Find the files that the kernel has. Raises SourceUnavailable."""
        paths = {name: self._folder / name for name in RESOURCES}
        files = {name: KernelFile(path) for name, path in paths.items() if path.exists()}
        if not files:
            raise SourceUnavailable("this kernel has no PSI (CONFIG_PSI)", whole=True)
        try:
            next(iter(files.values())).read()
        except SourceUnavailable as lost:
            text = lost.reason
            if isinstance(lost.__cause__, OSError) and lost.__cause__.errno == errno.EOPNOTSUPP:
                text = f"PSI is switched off: boot with psi=1 ({lost.reason})"
            raise SourceUnavailable(text, whole=True) from lost
        self._files = files

    def polls(self) -> Sequence[Poll]:
        """One poll."""
        return [Poll("pressure", NORMAL_S, self._read)]

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _read(self, points: Points) -> None:
        for resource, file in self._files.items():
            for kind, seconds in waiting_times(file.read()):
                label = self._labels.get((resource, kind))
                if label is None:
                    label = labels(sonde__resource=resource, sonde__pressure=kind.decode())
                    self._labels[resource, kind] = label
                self._counters.report(points, "sonde.host.pressure", seconds, label)


def waiting_times(raw: bytes) -> list[tuple[bytes, float]]:
    """(some | full, seconds so far) of each line of a pressure file."""
    found = []
    for line in raw.split(b"\n"):
        kind, _, rest = line.partition(b" ")
        total = rest.rpartition(b"total=")[2]
        if total.isdigit():
            found.append((kind, int(total) / 1e6))
    return found
