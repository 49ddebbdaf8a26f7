# SPDX-License-Identifier: Apache-2.0
"""What is known about a node's disks, fans, power supplies and sensors: input of the checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

FANS: Final = "fans"
VOLTAGES: Final = "voltages"
TEMPERATURES: Final = "chassis_temperature"
POWER_SUPPLIES: Final = "power_supplies"
OTHERS: Final = "chassis_sensors"
SENSOR_CHECKS: Final = (FANS, POWER_SUPPLIES, VOLTAGES, TEMPERATURES, OTHERS)
"""Checks of sensors, by what these measure."""
DISK_CHECKS: Final = ("disk_health", "disk_errors", "disk_spare", "disk_wear")


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk's SMART data; None where the disk does not report a value."""

    name: str
    state: str = ""
    """Of an NVMe controller, by the kernel; '' for other disks."""
    asleep: bool = False
    """It was not read, so that it goes on sleeping."""
    passed: bool | None = None
    """Overall health, as the disk judges itself."""
    warnings: int = 0
    """Bits of an NVMe controller's critical warning."""
    failed_before: tuple[str, ...] = ()
    """Names of ATA attributes that were beyond their threshold at some time."""
    errors: float | None = None
    """Media errors of an NVMe disk; sectors of another that are replaced or unreadable."""
    spare_percent: float | None = None
    spare_threshold_percent: float | None = None
    used_percent: float | None = None
    """Share of the writes that the maker expects the disk to endure."""
    trouble: str = ""
    """Why it could not be read."""


@dataclass(frozen=True, slots=True)
class Sensor:
    """A sensor with its limits, None where it has none; values are in `unit`."""

    check: str
    """One of `SENSOR_CHECKS`."""
    name: str
    unit: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    low_critical: float | None = None
    high_critical: float | None = None
    alarm: bool = False
    """The hardware itself reports that it is beyond a limit."""
    critical: bool = False
    """The same of a critical limit."""
    fault: bool = False
    """The hardware reports that what is measured, or the sensor, has failed."""
    states: tuple[str, ...] = ()
    """Of a sensor without a value: what it reports, as IPMI names it."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """Checks that were not made, although there is something to check."""

    checks: tuple[str, ...]
    reason: str
    remedy: str


@dataclass(slots=True)
class Hardware:
    """Facts about the parts of a node that are no devices."""

    disks: list[Disk] = field(default_factory=list)
    sensors: list[Sensor] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    left_out: int = 0
    """Disks and sensors beyond the limits, and lines of tools that could not be parsed."""
