# SPDX-License-Identifier: Apache-2.0
"""Time of each CPU by mode, and switches of the machine: /proc/stat."""

from __future__ import annotations

import os
from collections.abc import Sequence

from sonde.collect.host.files import Counters, KernelFile, labels
from sonde.collect.polling import NORMAL_S, Points, Poll, SourceUnavailable

MODES = ("user", "nice", "system", "idle", "iowait", "interrupt", "softirq", "steal")
"""Of /proc/stat in its order; guest time is in user time already."""
PLAIN = {b"ctxt": "sonde.host.switches", b"processes": "sonde.host.forks"}
"""Lines with one counter, and its series."""


class Processors:
    """What CPUs spend their time on."""

    name = "processors"

    def __init__(self) -> None:
        self._stat = KernelFile("/proc/stat")
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK")
        self._counters = Counters()
        self._labels: dict[tuple[bytes, str], str] = {}

    def open(self) -> None:
        """Check that it can be read. Raises SourceUnavailable."""
        if not self._stat.read():
            raise SourceUnavailable("/proc/stat is empty", whole=True)

    def polls(self) -> Sequence[Poll]:
        """One poll."""
        return [Poll("time", NORMAL_S, self._read)]

    def close(self) -> None:
        """Close the file."""
        self._stat.close()

    def _read(self, points: Points) -> None:
        for line in self._stat.read().split(b"\n"):
            name, *values = line.split(b" ")
            if name.startswith(b"cpu") and len(name) > 3:
                for mode, value in zip(MODES, values, strict=False):
                    seconds = int(value) * self._tick_s
                    self._counters.report(
                        points, "system.cpu.time", seconds, self._label(name, mode)
                    )
            elif name in PLAIN:
                self._counters.report(points, PLAIN[name], int(values[0]))
            elif name == b"procs_running":
                points.add("sonde.host.runnable", int(values[0]))
            elif name == b"procs_blocked":
                points.add("sonde.host.blocked", int(values[0]))

    def _label(self, cpu: bytes, mode: str) -> str:
        found = self._labels.get((cpu, mode))
        if found is None:
            number = int(cpu[3:])
            found = labels(cpu__logical_number=number, cpu__mode=mode)
            self._labels[cpu, mode] = found
        return found
