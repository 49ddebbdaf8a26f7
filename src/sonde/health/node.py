# SPDX-License-Identifier: Apache-2.0
"""Gathers the facts of this node: asks its devices, within a deadline, and reads its files."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from sonde.collect.apart import Apart
from sonde.collect.devices import present
from sonde.collect.polling import Points
from sonde.health.facts import Facts, devices_of
from sonde.metrics import MetricRow

DEADLINE_S = 15.0
"""An idle driver needs seconds to wake up; one that needs longer hangs."""
NVIDIA, DISPLAY = "0x10de", "0x03"
LIBRARY_PLACES = (
    *("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64"),
    *("usr/lib/x86_64-linux-gnu/nvidia/current", "usr/lib/aarch64-linux-gnu/nvidia/current"),
)
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")


def gather(root: Path = Path("/"), kernel_log: Path | None = None) -> Facts:
    """Ask and read. Never raises for what is not there; a hang is a trouble among the facts."""
    points = _ask()
    trouble = [str(row[6]) for row in points.events if row[2] == "signal_lost"]
    return with_files(points.metrics, trouble, root, kernel_log)


def with_files(
    rows: Iterable[MetricRow],
    trouble: list[str],
    root: Path = Path("/"),
    kernel_log: Path | None = None,
) -> Facts:
    """Facts of what devices said, with what the kernel's files say now."""
    facts = Facts(
        devices=devices_of(rows),
        trouble=trouble,
        on_the_bus=_on_the_bus(root),
        module_version=_module_version(root),
        installed=_installed(root),
        xids=_xids(_kernel_log(kernel_log)),
        ports=_ports(root),
    )
    facts.memory_corrected, facts.memory_uncorrected = _edac(root)
    return facts


def _ask() -> Points:
    """One round of every question to the devices."""
    if not present.nvidia():
        return Points()
    runner = Apart("nvml", "sonde.collect.devices.nvml:NvmlSource")
    points = Points()
    runner.start()
    try:
        end_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < end_s:
            more = runner.take()
            points.metrics += more.metrics
            points.events += more.events
            if points.metrics or points.events:
                return points
            time.sleep(0.02)
        points.note("signal_lost", 0.0, "nvml: does not answer")
        return points
    finally:
        runner.stop()


def _on_the_bus(root: Path) -> int:
    count = 0
    for device in _children(root / "sys/bus/pci/devices"):
        if _read(device / "vendor") == NVIDIA and _read(device / "class").startswith(DISPLAY):
            count += 1
    return count


def _module_version(root: Path) -> str:
    text = _read(root / "proc/driver/nvidia/version").partition("\n")[0]
    return next((word for word in text.split() if word[0].isdigit() and "." in word), "")


def _installed(root: Path) -> frozenset[str]:
    """Of `libnvidia-ml.so.580.159` and the like."""
    return frozenset(
        file.name.partition(".so.")[2]
        for place in LIBRARY_PLACES
        for file in (root / place).glob("libnvidia-ml.so.*.*")
    )


def _edac(root: Path) -> tuple[int | None, int | None]:
    """(corrected, uncorrected) errors of the host's memory."""
    controllers = _children(root / "sys/devices/system/edac/mc")
    counts = [
        [_read(one / name) for name in ("ce_count", "ue_count")]
        for one in controllers
        if one.name.startswith("mc")
    ]
    known = [(int(ce), int(ue)) for ce, ue in counts if ce.isdigit() and ue.isdigit()]
    if not known:
        return None, None
    return sum(ce for ce, _ in known), sum(ue for _, ue in known)


def _ports(root: Path) -> dict[str, str]:
    """'4: ACTIVE' is how the kernel says it."""
    return {
        f"{card.name}/{port.name}": _read(port / "state").rpartition(": ")[2]
        for card in _children(root / "sys/class/infiniband")
        for port in _children(card / "ports")
    }


def _kernel_log(path: Path | None) -> Iterable[str]:
    if path is not None:
        return _read(path).splitlines()
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ()
    lines = []
    try:
        while True:
            try:
                lines.append(os.read(fd, 8192).decode(errors="replace"))
            except BrokenPipeError:
                continue  # overwritten while we read: go on with the next
            except OSError:
                break  # no more
    finally:
        os.close(fd)
    return lines


def _xids(lines: Iterable[str]) -> list[tuple[str, int]]:
    found = (_XID.search(line) for line in lines)
    return [(one[1].lower(), int(one[2])) for one in found if one]


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
