# SPDX-License-Identifier: Apache-2.0
"""Reads fans, voltages, temperatures and power from /sys/class/hwmon.

Format: Documentation/hwmon/sysfs-interface.rst of the kernel. Attributes are named by type, number
and item (`fan1_input`); values are in RPM, mV, thousandths of a degree and µW.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sonde.health import tools
from sonde.health.hardware_facts import (
    FANS,
    POWER_SUPPLIES,
    TEMPERATURES,
    VOLTAGES,
    Hardware,
    Sensor,
)

MAX_CHIPS: Final = 512
MAX_SENSORS: Final = 2_048
_KINDS: Final = {
    "fan": (FANS, "RPM", 1.0),
    "in": (VOLTAGES, "V", 1e3),
    "temp": (TEMPERATURES, "°C", 1e3),
    "power": (POWER_SUPPLIES, "W", 1e6),
}
"""Type to check, unit, and what a value is divided by."""
_ITEM: Final = re.compile(
    r"(fan|in|temp|power)(\d{1,4})_(input|label|min|max|crit|lcrit|enable|fault"
    r"|alarm|min_alarm|max_alarm|crit_alarm|lcrit_alarm|emergency_alarm)"
)
_SKIPPED: Final = frozenset(
    # GPUs have checks already, a read may wake them; drivetemp keeps disks from sleeping; a limit
    # of acpi_power_meter is a cap that was set.
    ("amdgpu", "radeon", "nouveau", "i915", "xe", "drivetemp", "power_meter")
)
_MAX_IS_NO_LIMIT: Final = frozenset(("coretemp", "k10temp", "zenpower"))
"""Drivers of CPUs, whose `temp_max` is where fans should run fast, or a constant; and what
coretemp has as crit_alarm stays set until the next boot."""


def read(root: Path, deadline_s: float) -> Hardware:
    """All sensors. `deadline_s`: when to stop, on time.monotonic()'s clock."""
    found = Hardware()
    folder = root / "sys/class/hwmon"
    try:
        names = [it for it in os.listdir(folder) if re.fullmatch(r"hwmon\d+", it)]  # noqa: PTH208
    except OSError:
        return found
    names.sort(key=lambda name: int(name[len("hwmon") :]))
    found.left_out = max(len(names) - MAX_CHIPS, 0)
    for name in names[:MAX_CHIPS]:
        chip = folder / name
        asleep = tools.read(chip / "device/power/runtime_status") == "suspended"
        if not asleep and tools.read(chip / "name") not in _SKIPPED:
            _read_chip(chip, found, deadline_s)
    return found


def _read_chip(chip: Path, found: Hardware, deadline_s: float) -> None:
    items: dict[tuple[str, int], list[str]] = defaultdict(list)
    try:
        names = os.listdir(chip)  # noqa: PTH208
    except OSError:
        return
    for name in names:
        if parts := _ITEM.fullmatch(name):
            items[parts[1], int(parts[2])].append(parts[3])
    about = tools.read(chip / "name") or chip.name
    for (kind, number), present in sorted(items.items()):
        if len(found.sensors) >= MAX_SENSORS or time.monotonic() > deadline_s:
            found.left_out += 1
            continue
        values = {item: tools.read(chip / f"{kind}{number}_{item}") for item in present}
        if values.get("enable") != "0":
            found.sensors += _sensor(about, kind, number, values)


def _sensor(about: str, kind: str, number: int, values: Mapping[str, str]) -> list[Sensor]:
    """The sensor; none where it has neither a value nor a flag."""
    check, unit, scale = _KINDS[kind]
    value, low, high, high_critical, low_critical = (
        _scaled(values.get(item, ""), scale) for item in ("input", "min", "max", "crit", "lcrit")
    )
    is_cpu = about in _MAX_IS_NO_LIMIT
    critical = any(
        values.get(item) == "1" for item in ("crit_alarm", "lcrit_alarm", "emergency_alarm")
    )
    alarm = any(values.get(item) == "1" for item in ("alarm", "min_alarm", "max_alarm"))
    fault = values.get("fault") == "1"
    if value is None and not (alarm or critical or fault):
        return []
    if low is not None and high is not None and low >= high:
        low = high = None  # registers that nobody has set, and an alarm by them
        alarm = False
    if kind == "temp" and high is not None and high <= 0:
        high = None
    sensor = Sensor(
        check,
        f"{about} {values.get('label') or f'{kind}{number}'}",
        unit,
        value,
        low if kind in ("fan", "in") else None,
        None if is_cpu or kind == "fan" else high,
        low_critical if kind == "in" else None,
        None if kind == "fan" else high_critical or None,
        alarm=alarm or (critical and is_cpu),
        critical=critical and not is_cpu,
        fault=fault,
    )
    return [sensor]


def _scaled(text: str, scale: float) -> float | None:
    return int(text) / scale if re.fullmatch(r"-?\d{1,15}", text) else None
