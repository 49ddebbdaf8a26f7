# SPDX-License-Identifier: Apache-2.0
"""Gathers the facts of this node: asks its devices, within a deadline, and reads its files."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
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
XIDS_KEPT = 4_096
"""The newest: more than a kernel's log holds, which one bad device can fill."""
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
        xids=_xids(_read(kernel_log).split("\n")) if kernel_log else _LOG.xids(),
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
    found: set[str] = set()
    for place in LIBRARY_PLACES:
        folder = root / place
        with suppress(OSError):
            found |= _installed_in(str(folder), folder.stat().st_mtime_ns)
    return frozenset(found)


@lru_cache(maxsize=2 * len(LIBRARY_PLACES))
def _installed_in(folder: str, _changed_ns: int) -> frozenset[str]:
    """Looked through once, as long as the folder does not change: it has thousands of files."""
    return frozenset(
        file.name.partition(".so.")[2] for file in Path(folder).glob("libnvidia-ml.so.*.*")
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


class _KernelLog:
    """What the kernel's log had on XIDs so far. It stays open: an agent asks again and again, and
    reading all of the log takes a system call for each of its lines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = -1
        self._found: deque[tuple[str, int]] = deque(maxlen=XIDS_KEPT)

    def xids(self) -> list[tuple[str, int]]:
        """(PCI address, number) of each, in order."""
        with self._lock:
            if self._fd < 0:
                with suppress(OSError):
                    self._fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._found += _xids(self._new())
            return list(self._found)

    def _new(self) -> Iterator[str]:
        while self._fd >= 0:
            try:
                yield os.read(self._fd, 8192).decode(errors="replace")
            except BrokenPipeError:
                continue  # overwritten while we read: go on with the next
            except OSError:
                return  # no more


_LOG = _KernelLog()


def _xids(lines: Iterable[str]) -> list[tuple[str, int]]:
    found = (_XID.search(line) for line in lines if "Xid" in line)
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
