# SPDX-License-Identifier: Apache-2.0
"""Checks of disks, fans, power supplies and sensors: one result each, which names the bad ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from sonde.health.facts import Facts
from sonde.health.hardware_facts import (
    FANS,
    OTHERS,
    POWER_SUPPLIES,
    SENSOR_CHECKS,
    TEMPERATURES,
    VOLTAGES,
    Disk,
    Sensor,
)
from sonde.health.results import Result, Status, graded, limit, result, severity

Judged = tuple[Status, str]
"""Status of a disk or sensor, and what was found."""

_NAMED: Final = 6
"""Bad disks or sensors that a figure names."""
_WARNINGS: Final = (
    "spare below its threshold",
    "temperature beyond its limit",
    "unreliable",
    "read-only",
    "its backup of volatile memory failed",
    "its persistent memory is unreliable",
)
"""Bits of an NVMe controller's critical warning (NVM Express Base 2.0, figure 207)."""
_HEAT: Final = 0b10
_EXPECTED: Final = {
    FANS: "all turn, above their minimum",
    POWER_SUPPLIES: "all present ones work",
    VOLTAGES: "all within their limits",
    TEMPERATURES: "all below their limits",
    OTHERS: "no fault",
}
_FAILED: Final = (
    *("failure detected", "drive fault", "in failed array", "uncorrectable", "fatal error"),
    *("thermal trip", "ierr", "non-recoverable", "transition to critical", "ac lost", "input lost"),
    *("insufficient resources", "critical overtemperature"),
)
"""In names of IPMI's states (IPMI 2.0, tables 42-2 and 42-3), in lower case."""
_DOUBTFUL: Final = (
    *("predictive failure", "degraded", "non-redundant", "redundancy lost", "non-critical"),
    *("out-of-range", "config error", "critical array", "logging limit", "fail", "fault"),
)


def hardware_results(facts: Facts) -> Iterator[Result]:
    """The results of all checks for which there is a disk or sensor."""
    disks = [one for one in facts.hardware.disks if not one.asleep]
    asleep = len(facts.hardware.disks) - len(disks)
    note = f", {asleep} asleep" if asleep else ""
    for check, (judge, expected) in _DISK_CHECKS.items():
        found = [(one.name, judged) for one in disks if (judged := judge(one))]
        yield from _whole(check, found, "disks", note, expected, "disk")
    for check in SENSOR_CHECKS:
        sensors = [one for one in facts.hardware.sensors if one.check == check]
        found = _judged(check, sensors)
        yield from _whole(check, found, "sensors", "", _EXPECTED[check], "chassis")


def _whole(
    check: str,
    found: Sequence[tuple[str, Judged]],
    what: str,
    note: str,
    expected: str,
    failure: str,
) -> Iterator[Result]:
    """One result for all; none where there is nothing to judge."""
    if not found:
        return
    bad = [(name, one) for name, one in found if one[0] is not Status.PASS]
    bad.sort(key=lambda one: -severity(one[1][0]))
    status = bad[0][1][0] if bad else Status.PASS
    named = "; ".join(f"{name} {text}" for name, (_, text) in bad[:_NAMED])
    more = f"; {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    count = f"{len(found) - len(bad)} of {len(found)} {what} well{note}"
    figure = f"{named}{more} ({count})" if bad else count
    yield result(check, None, status, figure, expected, failure)


# ---- disks ----


def _health(disk: Disk) -> Judged | None:
    if disk.trouble:
        return Status.WARN, disk.trouble
    if disk.state == "dead":
        return Status.FAIL, "dead: the kernel has given it up"
    if disk.warnings:
        status = Status.FAIL if disk.warnings & ~_HEAT else Status.WARN
        texts = [text for bit, text in enumerate(_WARNINGS) if disk.warnings >> bit & 1]
        return status, ", ".join(texts) or f"critical warning {disk.warnings:#x}"
    if disk.passed is False:
        return Status.FAIL, "reports that it is about to fail"
    if disk.failed_before:
        return Status.WARN, f"was beyond a threshold before: {', '.join(disk.failed_before[:3])}"
    if disk.state not in ("", "live"):
        return Status.WARN, disk.state
    return (Status.PASS, "") if disk.passed or disk.state else None


def _errors(disk: Disk) -> Judged | None:
    if disk.errors is None:
        return None
    status = graded(disk.errors, limit("disk_errors_warn"), limit("disk_errors_fail"))
    return status, f"{disk.errors:,.0f}"


def _spare(disk: Disk) -> Judged | None:
    now, least = disk.spare_percent, disk.spare_threshold_percent
    if now is None or least is None or now == least == 0:  # 0 of 0: emulated disks have no spare
        return None
    near = now < 100 and now - least < limit("disk_spare_margin_percent")
    status = Status.FAIL if now < least else Status.WARN if near else Status.PASS
    return status, f"{now:.0f} % left, threshold {least:.0f} %"


def _wear(disk: Disk) -> Judged | None:
    if disk.used_percent is None:
        return None
    status = graded(disk.used_percent, limit("disk_used_warn_percent"), float("inf"))
    return status, f"{disk.used_percent:.0f} % used"


_DISK_CHECKS: Final[dict[str, tuple[Callable[[Disk], Judged | None], str]]] = {
    "disk_health": (_health, "each reports that it is well"),
    "disk_errors": (_errors, "0"),
    "disk_spare": (_spare, "above the threshold"),
    "disk_wear": (_wear, "below 90 %"),
}


# ---- sensors ----


def _judged(check: str, sensors: Iterable[Sensor]) -> list[tuple[str, Judged]]:
    found = [(one, _judge(one)) for one in sensors]
    others_work = any(
        judged[0] is Status.PASS and any("presence" in state.lower() for state in one.states)
        for one, judged in found
    )
    if check == POWER_SUPPLIES and others_work:  # what one supply lost, the others still give
        found = [(one, _of_one_supply(one, judged)) for one, judged in found]
    return [(one.name, judged) for one, judged in found]


def _of_one_supply(sensor: Sensor, judged: Judged) -> Judged:
    """A warning instead of a failure, unless the sensor reports that the rest is too little."""
    is_too_little = any("insufficient resources" in state.lower() for state in sensor.states)
    if sensor.value is not None or is_too_little:
        return judged
    return min(judged[0], Status.WARN, key=severity), judged[1]


def _judge(sensor: Sensor) -> Judged:
    """Of one sensor, by what it measures, by its flags and by its states."""
    by_value = _by_value(sensor)
    by_state = _by_states(sensor.states)
    status = max(by_value, by_state, key=severity)
    texts = [_value_text(sensor), ", ".join(sensor.states[:4])]
    flags = (("fault", sensor.fault), ("critical", sensor.critical), ("alarm", sensor.alarm))
    flag = next((name for name, is_set in flags if is_set), "")
    return status, ", ".join(text for text in (*texts, flag) if text)


def _by_value(sensor: Sensor) -> Status:
    fatal = sensor.critical or (sensor.fault and sensor.check in (FANS, POWER_SUPPLIES))
    doubtful = sensor.alarm or sensor.fault
    if sensor.value is not None:
        stopped = sensor.check == FANS and sensor.value == 0 and bool(sensor.low)
        fatal = fatal or stopped or _is_beyond(sensor, sensor.low_critical, sensor.high_critical)
        doubtful = doubtful or _is_beyond(sensor, sensor.low, sensor.high)
    return Status.FAIL if fatal else Status.WARN if doubtful else Status.PASS


def _is_beyond(sensor: Sensor, low: float | None, high: float | None) -> bool:
    value = sensor.value
    if value is None:
        return False
    reached = high is not None and (value >= high if sensor.check == TEMPERATURES else value > high)
    return reached or (low is not None and value < low)


def _value_text(sensor: Sensor) -> str:
    if sensor.value is None:
        return ""
    limits = (
        ("minimum", sensor.low),
        ("maximum", sensor.high),
        ("critical", sensor.low_critical),
        ("critical", sensor.high_critical),
    )
    text = "".join(f", {name} {value:g}" for name, value in limits if value is not None)
    return f"{sensor.value:g} {sensor.unit}{text}"


def _by_states(states: Iterable[str]) -> Status:
    found = Status.PASS
    for state in states:
        name = state.lower()
        if "deasserted" in name or "intrusion" in name:
            continue
        if any(word in name for word in _FAILED) and "non-critical" not in name:
            return Status.FAIL
        if any(word in name for word in _DOUBTFUL):
            found = Status.WARN
    return found
