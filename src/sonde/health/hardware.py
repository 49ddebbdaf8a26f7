# SPDX-License-Identifier: Apache-2.0
"""Collects facts about disks, fans, power supplies and sensors, all sources at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sonde.health import disks, hwmon, ipmi
from sonde.health.hardware_facts import DISK_CHECKS, SENSOR_CHECKS, Hardware, Skipped

DEADLINE_S: Final = 20.0
"""A BMC takes seconds for a hundred sensors; Slurm ends a HealthCheckProgram after 60 s."""
GRACE_S: Final = 2.0
"""For ending a tool that took too long."""

Source = Callable[[Path, float], Hardware]


class Collection:
    """Sources that are being read, each in a thread: a file of a hung driver is never waited for
    longer than `DEADLINE_S`."""

    def __init__(self, root: Path) -> None:
        self._deadline_s = time.monotonic() + DEADLINE_S
        self._found: dict[str, Hardware | Exception] = {}
        self._threads = {
            name: threading.Thread(target=self._read, args=(name, read, root), daemon=True)
            for name, (read, _) in _SOURCES.items()
        }
        for thread in self._threads.values():
            thread.start()

    def facts(self) -> Hardware:
        """What was found, when all have ended or the time is over."""
        whole = Hardware()
        for name, thread in self._threads.items():
            thread.join(max(self._deadline_s + GRACE_S - time.monotonic(), 0.0))
            found = self._found.get(name)
            if isinstance(found, Exception):
                raise found
            if found is None:
                reason = f"{name} did not answer within {DEADLINE_S:.0f} s"
                remedy = "Look for errors of drivers with dmesg."
                found = Hardware(skipped=[Skipped(_SOURCES[name][1], reason, remedy)])
            whole.disks += found.disks
            whole.sensors += found.sensors
            whole.skipped += found.skipped
            whole.left_out += found.left_out
        return whole

    def _read(self, name: str, read: Source, root: Path) -> None:
        try:
            self._found[name] = read(root, self._deadline_s)
        except Exception as error:  # raised again by `facts`, in the caller's thread
            self._found[name] = error


_SOURCES: Final[dict[str, tuple[Source, tuple[str, ...]]]] = {
    "disks": (disks.read, DISK_CHECKS),
    "hwmon": (hwmon.read, SENSOR_CHECKS),
    "IPMI": (ipmi.read, SENSOR_CHECKS),
}
"""Name to function and the checks that have no data without it."""
