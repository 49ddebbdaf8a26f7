# SPDX-License-Identifier: Apache-2.0
"""Reads the sensors of a chassis from its management controller (BMC), by `ipmitool` or
`ipmi-sensors`.

Lines of `ipmitool -c sdr elist` (lib/ipmi_sdr.c of ipmitool): a sensor with thresholds has name,
value, unit, status; another one has name, number or value and unit, status, entity, states.
Lines of `ipmi-sensors` (ipmi-sensors(8)): id, name, type, state, value, unit, quoted events.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from sonde.health import tools
from sonde.health.hardware_facts import (
    FANS,
    OTHERS,
    POWER_SUPPLIES,
    SENSOR_CHECKS,
    TEMPERATURES,
    VOLTAGES,
    Hardware,
    Sensor,
    Skipped,
)

MAX_SENSORS: Final = 2_048
_DEVICES: Final = ("dev/ipmi0", "dev/ipmi/0", "dev/ipmidev/0")
_UNITS: Final = {
    "RPM": (FANS, "RPM"),
    "Volts": (VOLTAGES, "V"),
    "V": (VOLTAGES, "V"),
    "degrees C": (TEMPERATURES, "°C"),
    "C": (TEMPERATURES, "°C"),
    "Watts": (OTHERS, "W"),
    "W": (OTHERS, "W"),
    "Amps": (OTHERS, "A"),
    "A": (OTHERS, "A"),
}
"""Units of both tools to check and unit."""
_STATUS: Final = frozenset(("ok", "nc", "cr", "nr", "lnc", "lcr", "lnr", "unc", "ucr", "unr", "ns"))
_ENTITIES: Final = {10: POWER_SUPPLIES, 29: FANS, 30: FANS}
"""Entities of IPMI 2.0, table 43-13: power supply, fan, cooling unit."""
_TYPES: Final = {
    "Fan": FANS,
    "Voltage": VOLTAGES,
    "Temperature": TEMPERATURES,
    "Power Supply": POWER_SUPPLIES,
}
_STATES: Final = frozenset(("Nominal", "Warning", "Critical", "N/A"))
_EVENT: Final = re.compile(r"'([^']{1,80})'")
_NO_EVENTS: Final = frozenset(("OK", "N/A", "No Event", "Unknown"))


class Tool(NamedTuple):
    """A program that lists sensors."""

    name: str
    options: tuple[str, ...]
    parse: Callable[[str], list[Sensor] | None]
    """Sensors of a line; None for a line of another format."""


def read(root: Path, deadline_s: float) -> Hardware:
    """All sensors that the BMC reports; none without one. `deadline_s`: when to stop, on
    time.monotonic()'s clock."""
    found = Hardware()
    device = next((root / path for path in _DEVICES if (root / path).exists()), None)
    if device is None:
        return found
    if not os.access(device, os.R_OK | os.W_OK):
        return _skipped("the BMC cannot be queried", "Run as root.")
    for tool in TOOLS:
        if path := tools.find(tool.name):
            return _by(tool, path, deadline_s)
    return _skipped("neither ipmitool nor ipmi-sensors is installed", "Install ipmitool.")


def _skipped(reason: str, remedy: str) -> Hardware:
    return Hardware(skipped=[Skipped(SENSOR_CHECKS, f"IPMI: {reason}", remedy)])


def _by(tool: Tool, path: str, deadline_s: float) -> Hardware:
    left_s = deadline_s - time.monotonic()
    by_hand = f"Run {tool.name} {' '.join(tool.options)} to see why; reset the BMC if it hangs."
    try:
        done = tools.run((path, *tool.options), left_s)
    except TimeoutError:
        return _skipped(f"{tool.name} did not end within {left_s:.0f} s", by_hand)
    except OSError as error:
        return _skipped(f"{tool.name}: {tools.clean(str(error))}", by_hand)
    found = parse(tool, done.text)
    if not found.sensors and (done.code or found.left_out):
        return _skipped(f"{tool.name} listed no sensor (exit code {done.code})", by_hand)
    return found


def parse(tool: Tool, text: str) -> Hardware:
    """The sensors in a tool's output."""
    found = Hardware()
    for line in text.split("\n"):
        if not line.strip():
            continue
        sensors = tool.parse(line) if len(found.sensors) < MAX_SENSORS else None
        if sensors is None:
            found.left_out += 1
        else:
            found.sensors += sensors
    return found


def _ipmitool_line(line: str) -> list[Sensor] | None:
    fields = [tools.clean(part) for part in line[:512].split(",")]
    # A name may have commas: of the fields that look like a status the first one counts.
    at = next((i for i, part in enumerate(fields[2:], 2) if part in _STATUS), None)
    if at is None:
        return None
    status, rest = fields[at], fields[at + 1 :]
    discrete = bool(rest) and re.fullmatch(r"\d{1,3}\.\d{1,3}", rest[0])
    if status == "ns":
        return []
    if discrete:
        analog = at >= 3 and _value(fields[at - 2]) is not None
        name = ",".join(fields[: at - (2 if analog else 1)])
        check = _ENTITIES.get(int(rest[0].partition(".")[0]), OTHERS)
        return [Sensor(check, name, states=tuple(part for part in rest[1:] if part))]
    value, unit = _value(fields[at - 2]) if at >= 3 else None, fields[at - 1]
    if value is None:
        return None
    check, unit = _UNITS.get(unit, (OTHERS, unit))
    return [
        Sensor(
            check,
            ",".join(fields[: at - 2]),
            unit,
            value,
            alarm=status.endswith("nc"),
            critical=status.endswith(("cr", "nr")),
        )
    ]


def _ipmi_sensors_line(line: str) -> list[Sensor] | None:
    fields = [tools.clean(part) for part in line[:1_024].split(",", 6)]
    if len(fields) != 7 or fields[3] not in _STATES:
        return None
    _, name, kind, state, reading, unit, events = fields
    value = _value(reading)
    states = tuple(one for one in _EVENT.findall(events) if one not in _NO_EVENTS)
    if value is None and not states and state == "N/A":
        return []
    return [
        Sensor(
            _TYPES.get(kind, OTHERS),
            name,
            _UNITS.get(unit, ("", unit))[1] if value is not None else "",
            value,
            alarm=value is not None and state == "Warning",
            critical=value is not None and state == "Critical",
            states=states,
        )
    ]


def _value(text: str) -> float | None:
    if not re.fullmatch(r"-?\d{1,12}(\.\d{1,6})?", text):
        return None
    value = float(text)
    return value if math.isfinite(value) else None


TOOLS: Final = (
    Tool("ipmitool", ("-c", "sdr", "elist"), _ipmitool_line),
    Tool(
        "ipmi-sensors",
        (
            *("--driver-type=OPENIPMI", "--quiet-cache", "--no-header-output"),
            *("--comma-separated-output", "--output-sensor-state"),
        ),
        _ipmi_sensors_line,
    ),
)
"""The first one that is installed is run."""
