# SPDX-License-Identifier: Apache-2.0
"""A node with disks, fans, power supplies and sensors: files as the kernel has them, and programs
that write what smartctl 7, ipmitool and ipmi-sensors write."""

from __future__ import annotations

import json
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

from sonde.health import disks, hwmon, ipmi
from sonde.health.hardware_facts import Hardware

FILES = {
    "sys/class/nvme/nvme0/state": "live",
    "sys/class/nvme/nvme0/transport": "pcie",
    "sys/class/nvme/nvme7/state": "live",
    "sys/class/nvme/nvme7/transport": "tcp",
    "sys/block/sda/removable": "0",
    "sys/block/sda/device/vendor": "ATA     ",
    "sys/block/vda/removable": "0",
    "sys/class/hwmon/hwmon0/name": "nct6798",
    "sys/class/hwmon/hwmon0/fan1_input": "2100",
    "sys/class/hwmon/hwmon0/fan1_min": "500",
    "sys/class/hwmon/hwmon0/fan1_alarm": "0",
    "sys/class/hwmon/hwmon0/fan1_label": "CPU fan",
    "sys/class/hwmon/hwmon0/in0_input": "1016",
    "sys/class/hwmon/hwmon0/in0_min": "900",
    "sys/class/hwmon/hwmon0/in0_max": "1200",
    "sys/class/hwmon/hwmon0/in0_lcrit": "800",
    "sys/class/hwmon/hwmon1/name": "coretemp",
    "sys/class/hwmon/hwmon1/temp1_input": "88000",
    "sys/class/hwmon/hwmon1/temp1_max": "80000",
    "sys/class/hwmon/hwmon1/temp1_crit": "100000",
    "sys/class/hwmon/hwmon1/temp1_crit_alarm": "0",
    "sys/class/hwmon/hwmon1/temp1_label": "Package id 0",
    "sys/class/hwmon/hwmon2/name": "jc42",
    "sys/class/hwmon/hwmon2/temp1_input": "41500",
    "sys/class/hwmon/hwmon2/temp1_max": "85000",
    "sys/class/hwmon/hwmon2/temp1_crit": "95000",
    "sys/class/hwmon/hwmon3/name": "amdgpu",
    "sys/class/hwmon/hwmon3/temp1_input": "120000",
    "sys/class/hwmon/hwmon3/temp1_crit": "100000",
    "dev/nvme0": "",
    "dev/nvme7": "",
    "dev/sda": "",
    "dev/ipmi0": "",
}

NVME: dict[str, Any] = {
    "json_format_version": [1, 0],
    "smartctl": {"version": [7, 3], "exit_status": 0},
    "device": {"name": "/dev/nvme0", "type": "nvme", "protocol": "NVMe"},
    "smart_status": {"passed": True, "nvme": {"value": 0}},
    "nvme_smart_health_information_log": {
        "critical_warning": 0,
        "temperature": 38,
        "available_spare": 100,
        "available_spare_threshold": 10,
        "percentage_used": 3,
        "media_errors": 0,
        "num_err_log_entries": 12,
    },
}
SATA: dict[str, Any] = {
    "json_format_version": [1, 0],
    "smartctl": {"version": [7, 3], "exit_status": 0},
    "device": {"name": "/dev/sda", "type": "sat", "protocol": "ATA"},
    "smart_status": {"passed": True},
    "ata_smart_attributes": {
        "revision": 16,
        "table": [
            {"id": 5, "name": "Reallocated_Sector_Ct", "value": 100, "worst": 100, "thresh": 10,
             "when_failed": "", "raw": {"value": 4294967296, "string": "0 (1 0)"}},
            {"id": 194, "name": "Temperature_Celsius", "value": 30, "worst": 45, "thresh": 0,
             "when_failed": "", "raw": {"value": 30, "string": "30 (Min/Max 20/45)"}},
            {"id": 197, "name": "Current_Pending_Sector", "value": 100, "worst": 100, "thresh": 0,
             "when_failed": "", "raw": {"value": 0, "string": "0"}},
        ],
    },
}  # fmt: skip
STANDBY: dict[str, Any] = {
    "smartctl": {
        "exit_status": 2,
        "messages": [
            {"string": "Device is in STANDBY mode, exit(2)", "severity": "information"}
        ],
    },
}  # fmt: skip

IPMITOOL = """\
Inlet Temp,23,degrees C,ok
CPU1 Temp,61,degrees C,ok
FAN1,7800,RPM,ok
FAN2,,,ns
12V,12.192,Volts,ok
Pwr Consumption,280,Watts,ok
PS1 Status,C8h,ok,10.1,Presence detected
PS2 Status,C9h,ok,10.2,Presence detected
PS Redundancy,77h,ok,7.1,Fully Redundant
Drive 0,60h,ok,4.1,Drive Present
Intrusion,73h,ok,23.1,General Chassis intrusion
CPU1 Status,70h,ok,3.1,Presence detected
SEL,72h,ns,7.1,No Reading
"""
IPMI_SENSORS = """\
4,CPU1 Temp,Temperature,Nominal,61.00,C,'OK'
71,FAN1,Fan,Nominal,7800.00,RPM,'OK'
138,12V,Voltage,Nominal,12.19,V,'OK'
205,PS1 Status,Power Supply,Nominal,N/A,N/A,'Presence detected'
206,PS2 Status,Power Supply,Nominal,N/A,N/A,'Presence detected'
300,Memory Slot,Slot/Connector,N/A,N/A,N/A,N/A
"""


def nvme(*, passed: bool = True, **values: object) -> dict[str, Any]:
    """The answer for the NVMe disk, with other values in its log."""
    answer = deepcopy(NVME)
    answer["smart_status"]["passed"] = passed
    answer["nvme_smart_health_information_log"] |= values
    return {"nvme": answer}


def sata(number: int, *, passed: bool = True, **values: object) -> dict[str, Any]:
    """The answer for the SATA disk, with other values of one attribute."""
    answer = deepcopy(SATA)
    answer["smart_status"]["passed"] = passed
    for one in answer["ata_smart_attributes"]["table"]:
        if one["id"] == number:
            one |= values
    return {"sata": answer}


def line(old: str, new: str) -> dict[str, Any]:
    """The lines of ipmitool with one part replaced."""
    assert old in IPMITOOL
    return {"sensors": IPMITOOL.replace(old, new)}


HWMON = "sys/class/hwmon/hwmon"
# check, state: changes of files, answers of tools
HARDWARE_STATES: dict[tuple[str, str], tuple[dict[str, str], dict[str, Any]]] = {
    ("disk_health", "warn"): ({}, nvme(passed=False, critical_warning=2)),
    ("disk_health", "fail"): ({}, nvme(passed=False, critical_warning=8)),
    ("disk_errors", "warn"): ({}, nvme(media_errors=1)),
    ("disk_errors", "fail"): ({}, sata(197, raw={"value": 100, "string": "100"})),
    ("disk_spare", "warn"): ({}, nvme(available_spare=19)),
    ("disk_spare", "fail"): ({}, nvme(available_spare=9)),
    ("disk_wear", "warn"): ({}, nvme(percentage_used=90)),
    ("fans", "warn"): ({f"{HWMON}0/fan1_input": "499"}, {}),
    ("fans", "fail"): ({f"{HWMON}0/fan1_input": "0"}, {}),
    ("power_supplies", "warn"): (
        {},
        line("10.2,Presence detected", "10.2,Presence detected, Power Supply AC lost"),
    ),
    ("power_supplies", "fail"): (
        {},
        {
            "sensors": IPMITOOL.replace("10.1,Presence", "10.1,Failure").replace(
                "10.2,Presence detected", "10.2,Presence detected, AC lost or out-of-range"
            )
        },
    ),
    ("voltages", "warn"): ({f"{HWMON}0/in0_input": "1201"}, {}),
    ("voltages", "fail"): ({f"{HWMON}0/in0_input": "799"}, {}),
    ("chassis_temperature", "warn"): ({f"{HWMON}2/temp1_input": "85000"}, {}),
    ("chassis_temperature", "fail"): ({f"{HWMON}2/temp1_input": "95000"}, {}),
    ("chassis_sensors", "warn"): (
        {},
        line("Fully Redundant", "Non-Redundant: Sufficient from Redundant"),
    ),
    ("chassis_sensors", "fail"): ({}, line("Drive Present", "Drive Present, Drive Fault")),
}


def write_files(root: Path, changes: dict[str, str | None] | None = None) -> None:
    """The files below `root`, with other contents, or without those that are None."""
    for path, text in (FILES | (changes or {})).items():
        if text is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(f"{text}\n")


def write_tool(folder: Path, name: str, script: str) -> None:
    """A program in `folder`: a script of the shell."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def write_tools(
    folder: Path,
    nvme: object = NVME,
    sata: object = SATA,
    sensors: str = IPMITOOL,
) -> None:
    """Programs that write these answers; smartctl also a line for each run into `asked`."""
    folder.mkdir(exist_ok=True)
    for name, answer in (("nvme0", nvme), ("sda", sata)):
        (folder / f"{name}.json").write_text(json.dumps(answer))
    (folder / "sensors").write_text(sensors)
    smartctl = f"""
echo "$@" >> {folder}/asked
for device in "$@"; do :; done
file={folder}/$(basename "$device").json
cat "$file"
grep -q STANDBY "$file" && exit 2
exit 0"""
    write_tool(folder, "smartctl", smartctl)
    write_tool(folder, "ipmitool", f'[ "$*" = "-c sdr elist" ] && cat {folder}/sensors')


def collected(root: Path) -> Hardware:
    """What the three sources find."""
    whole = Hardware()
    for source in (disks.read, hwmon.read, ipmi.read):
        found = source(root, time.monotonic() + 20)
        whole.disks += found.disks
        whole.sensors += found.sensors
        whole.skipped += found.skipped
        whole.left_out += found.left_out
    return whole
