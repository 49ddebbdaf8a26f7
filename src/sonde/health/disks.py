# SPDX-License-Identifier: Apache-2.0
"""Reads disks: SMART data by `smartctl`, and the states of NVMe controllers from sysfs.

`smartctl` is run once for each disk, with `-n standby`; a disk that sleeps, or that the kernel has
suspended, is left asleep. The type of a disk is given, because commands that find it out may wake
it (smartctl(8)).
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sonde.health import tools
from sonde.health.hardware_facts import DISK_CHECKS, Disk, Hardware, Skipped

DISK_S: Final = 10.0
"""Time limit of one disk."""
MAX_DISKS: Final = 128
_ASLEEP: Final = re.compile(r"Device is in [A-Z_ ()]{1,40} mode", re.IGNORECASE)
"""What smartctl writes where `-n standby` keeps it from reading a disk."""
_DENIED: Final = "smartctl has no permission"
_NO_JSON: Final = "smartctl does not write JSON"
_REMEDIES: Final = {
    _DENIED: "Run as root, outside a container.",
    _NO_JSON: "Install smartmontools, 7.0 or newer.",
}
"""Of what keeps smartctl from reading any disk."""
_REFUSALS: Final = ("permission denied", "operation not permitted")
_NOT_OPENED: Final = 0b10
"""Bit of smartctl's exit code."""
_ENDURANCE: Final = (7, 8)
_SECTORS: Final = (5, 197, 198)
"""ATA attributes: reallocated sectors, pending ones, and those that cannot be corrected offline."""


def read(root: Path, deadline_s: float) -> Hardware:
    """All disks with SMART data. `deadline_s`: when to stop, on time.monotonic()'s clock."""
    found = Hardware()
    disks = _nvme(root) + _scsi(root)
    found.left_out = max(len(disks) - MAX_DISKS, 0)
    tool = tools.find("smartctl") if disks else None
    for at, state in disks[:MAX_DISKS]:
        device = root / "dev" / at.name
        if state == "dead":
            found.disks.append(Disk(at.name, state))
        elif tools.read(at / "device/power/runtime_status") == "suspended":
            found.disks.append(Disk(at.name, state, asleep=True))
        elif tool is None:
            found.disks.append(Disk(at.name, state))
        elif not os.access(device, os.R_OK):
            found.disks.append(Disk(at.name, state, trouble=_DENIED))
        else:
            found.disks.append(_by_smartctl((tool, "-d", _type_of(at)), device, state, deadline_s))
    if disks and tool is None:
        remedy = _REMEDIES[_NO_JSON]
        found.skipped.append(Skipped(_without(found), "smartctl is not installed", remedy))
    for reason, remedy in _REMEDIES.items():
        unread = [disk.trouble == reason for disk in found.disks]
        if any(unread):
            found.disks = [
                Disk(disk.name, disk.state) if is_unread else disk
                for disk, is_unread in zip(found.disks, unread, strict=True)
            ]
            found.skipped.append(Skipped(_without(found), reason, remedy))
    return found


def _without(found: Hardware) -> tuple[str, ...]:
    """The checks that lack data without smartctl: states of NVMe controllers are known."""
    return DISK_CHECKS[1:] if any(disk.state for disk in found.disks) else DISK_CHECKS


def _nvme(root: Path) -> list[tuple[Path, str]]:
    """(folder, state) of the controllers in this machine; not of those that a network has."""
    return [
        (at, tools.read(at / "state") or "live")
        for at in _folders(root / "sys/class/nvme", r"nvme\d+")
        if tools.read(at / "transport") in ("", "pcie", "apple-nvme")
    ]


def _scsi(root: Path) -> list[tuple[Path, str]]:
    """SATA and SAS disks; not those of USB, whose adapters often wake a disk that is asked."""
    return [
        (at, "")
        for at in _folders(root / "sys/block", r"sd[a-z]+")
        if tools.read(at / "removable") != "1" and "/usb" not in os.path.realpath(at)
    ]


def _folders(folder: Path, pattern: str) -> list[Path]:
    try:
        names = [name for name in os.listdir(folder) if re.fullmatch(pattern, name)]  # noqa: PTH208
    except OSError:
        return []
    return [folder / name for name in sorted(names, key=lambda name: (len(name), name))]


def _type_of(at: Path) -> str:
    """As smartctl names it: NVMe, SATA (which Linux addresses as SCSI) or SAS."""
    if at.name.startswith("nvme"):
        return "nvme"
    return "sat" if tools.read(at / "device/vendor") == "ATA" else "scsi"


def _by_smartctl(tool: Sequence[str], device: Path, state: str, deadline_s: float) -> Disk:
    options = ("--json=c", "-n", "standby", "-i", "-H", "-A", "-l", "ssd")
    left_s = min(DISK_S, deadline_s - time.monotonic())
    if left_s <= 0:
        return Disk(device.name, state, trouble="no time was left")
    try:
        done = tools.run((*tool, *options, str(device)), left_s)
    except TimeoutError:
        return Disk(device.name, state, trouble=f"no answer within {left_s:.0f} s")
    except OSError as error:
        return Disk(device.name, state, trouble=tools.clean(str(error)))
    return parse(device.name, done.text, done.code, state)


def parse(name: str, text: str, code: int, state: str = "") -> Disk:
    """A disk from what `smartctl --json` wrote, and its exit code."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        return Disk(name, state, trouble=_NO_JSON)
    texts = _messages(answer)
    if code & _NOT_OPENED:
        if any(_ASLEEP.search(one) for one in texts):
            return Disk(name, state, asleep=True)
        denied = any(word in one.lower() for one in texts for word in _REFUSALS)
        return Disk(name, state, trouble=_DENIED if denied else "")
    log = _mapping(answer.get("nvme_smart_health_information_log"))
    passed = _mapping(answer.get("smart_status")).get("passed")
    spare, used = (_mapping(answer.get(key)) for key in ("spare_available", "endurance_used"))
    return Disk(
        name,
        state,
        passed=passed if isinstance(passed, bool) else None,
        warnings=int(_number(log.get("critical_warning")) or 0) & 0xFF,
        failed_before=_failed_before(answer),
        errors=_number(log.get("media_errors")) if log else _sectors(answer),
        spare_percent=_first(log.get("available_spare"), spare.get("current_percent")),
        spare_threshold_percent=_first(
            log.get("available_spare_threshold"), spare.get("threshold_percent")
        ),
        used_percent=_first(
            log.get("percentage_used"),
            used.get("current_percent"),  # from smartctl 7.4 on
            answer.get("scsi_percentage_used_endurance_indicator"),
            _endurance(answer),
        ),
    )


def _messages(answer: Mapping[str, Any]) -> list[str]:
    messages = _list(_mapping(answer.get("smartctl")).get("messages"))
    return [str(one.get("string", ""))[:200] for one in messages]


def _attributes(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """ATA attributes: ATA has room for 30."""
    return _list(_mapping(answer.get("ata_smart_attributes")).get("table"))


def _endurance(answer: Mapping[str, Any]) -> object:
    """Of page 7 of ATA's device statistics, at offset 8 (ACS-4)."""
    for page in _list(_mapping(answer.get("ata_device_statistics")).get("pages")):
        for one in _list(page.get("table")):
            if (page.get("number"), one.get("offset")) == _ENDURANCE:
                return one.get("value")
    return None


def _failed_before(answer: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        tools.clean(str(one.get("name", one.get("id", ""))))
        for one in _attributes(answer)
        if one.get("when_failed") == "past"
    )


def _sectors(answer: Mapping[str, Any]) -> float | None:
    counts = [
        count
        for one in _attributes(answer)
        if one.get("id") in _SECTORS and (count := _raw(_mapping(one.get("raw")))) is not None
    ]
    return sum(counts) if counts else None


def _raw(raw: Mapping[str, Any]) -> float | None:
    """A counter: the text has it apart from what makers keep in the upper bytes of the value."""
    start = re.match(r"\d{1,15}(?!\d)", str(raw.get("string", ""))[:40])
    return float(start[0]) if start else _number(raw.get("value"))


def _list(value: object) -> list[Mapping[str, Any]]:
    """The first 64 entries of a list, which are to be objects."""
    return [_mapping(one) for one in value[:64]] if isinstance(value, list) else []


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _first(*values: object) -> float | None:
    return next((one for value in values if (one := _number(value)) is not None), None)


def _number(value: object) -> float | None:
    """A number from JSON that is not negative; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number >= 0 else None
