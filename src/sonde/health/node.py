# SPDX-License-Identifier: Apache-2.0
"""Collects the facts of this node: queries its devices with a deadline, and reads its files."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path

from sonde.collect.devices import present
from sonde.collect.polling import Points
from sonde.collect.subprocess_runner import SubprocessRunner
from sonde.errors import UsageError
from sonde.health.facts import Facts, devices_of
from sonde.metrics import MetricRow

DEADLINE_S = 15.0
"""An idle driver needs seconds to initialise; one that needs longer hangs."""
NVIDIA, DISPLAY = "0x10de", "0x03"
"""PCI vendor id, and the beginning of the PCI classes of GPUs (display controllers)."""
LIBRARY_FOLDERS = (
    *("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64"),
    *("usr/lib/x86_64-linux-gnu/nvidia/current", "usr/lib/aarch64-linux-gnu/nvidia/current"),
)
"""Where distributions install NVML."""
XIDS_KEPT = 4_096
"""Different ones that are kept, the first: more than there are of any node's devices."""
MAX_RECORDS = 65_536
"""Of the kernel's log, read at a time: users can have it grow while it is read."""
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
"""Only where a record's text begins: the kernel logs texts of any user further behind, such as the
options of a mount that failed."""
_RECORD = re.compile(r"[0-7],\d+,\d+,[^;\n]*;")
"""What /dev/kmsg writes before the text of a record of the kernel itself: numbers from 8 on are of
records that a program wrote there."""
_NUMBER = re.compile(r"\d{1,4},(\d{1,19}),")
"""How a record of /dev/kmsg begins: priority and number, which counts all records since the start
of the machine."""
_LINE = re.compile(r"(?:kern *:\w+ *: )?(\[ *\d+\.\d+\]) ?(?:\[ *[TC]\d+\] *)?")
"""The same of `dmesg`, also with -x; (time)."""


def gather(root: Path = Path("/"), kernel_log: Path | None = None) -> Facts:
    """Collect all facts. Missing devices and files raise nothing; a hang is listed in `trouble`.
    Raises UsageError where `kernel_log` is neither of `dmesg` nor of /dev/kmsg."""
    from sonde.health.hardware import Collection  # an agent does not need it

    hardware = Collection(root)
    points = _poll_devices()
    trouble = [event.text for event in points.events if event.name == "signal_lost"]
    facts = with_files(points.metrics, trouble, root, kernel_log)
    facts.hardware = hardware.facts()
    return facts


def with_files(
    rows: Iterable[MetricRow],
    trouble: list[str],
    root: Path = Path("/"),
    kernel_log: Path | None = None,
) -> Facts:
    """Facts from rows of device metrics, with the present content of the kernel's files."""
    facts = Facts(
        devices=devices_of(rows),
        trouble=trouble,
        on_the_bus=_on_the_bus(root),
        module_version=_module_version(root),
        installed=_installed(root),
        xids=_xids_in(_read(kernel_log)) if kernel_log else _LOG.xids(),
        log_lost=0 if kernel_log else _LOG.lost,
        ports=_ports(root),
    )
    facts.memory_corrected, facts.memory_uncorrected = _edac(root)
    return facts


def _poll_devices() -> Points:
    """Points of the first poll of all devices; where they do not answer, an event with the reason;
    none without a driver."""
    if not present.nvidia():
        return Points()
    runner = SubprocessRunner("nvml", "sonde.collect.devices.nvml:NvmlSource")
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
    """See `Facts`."""
    count = 0
    for device in _children(root / "sys/bus/pci/devices"):
        if _read(device / "vendor") == NVIDIA and _read(device / "class").startswith(DISPLAY):
            count += 1
    return count


def _module_version(root: Path) -> str:
    text = _read(root / "proc/driver/nvidia/version").partition("\n")[0]
    return next((word for word in text.split() if word[0].isdigit() and "." in word), "")


def _installed(root: Path) -> frozenset[str]:
    """Versions in names such as `libnvidia-ml.so.580.159`."""
    found: set[str] = set()
    for path in LIBRARY_FOLDERS:
        folder = root / path
        with suppress(OSError):
            found |= _installed_in(str(folder), folder.stat().st_mtime_ns)
    return frozenset(found)


@lru_cache(maxsize=2 * len(LIBRARY_FOLDERS))
def _installed_in(folder: str, _changed_ns: int) -> frozenset[str]:
    """Cached until the folder changes: it has thousands of files."""
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
    """Port name to state; the kernel's files have the form '4: ACTIVE'."""
    return {
        f"{card.name}/{port.name}": _read(port / "state").rpartition(": ")[2]
        for card in _children(root / "sys/class/infiniband")
        for port in _children(card / "ports")
    }


class _KernelLog:
    """XID errors in the kernel's log so far.

    The log stays open: an agent reads it repeatedly, and reading the whole log takes one system
    call per line.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = -1
        self._found: dict[tuple[str, int], None] = {}
        self._next = 0
        """Number of the record that comes next."""
        self.lost = 0
        """Records that were overwritten before they were read: since the machine's start, of all
        that may have been errors of devices."""

    def xids(self) -> list[tuple[str, int]]:
        """(PCI address, number) of each, once, in order. Of records that come while it reads it
        leaves those beyond `MAX_RECORDS` to the next call."""
        with self._lock:
            if self._fd < 0:
                with suppress(OSError):
                    self._fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            for one in _xids(islice(self._new(), MAX_RECORDS)):
                if len(self._found) < XIDS_KEPT:
                    self._found[one] = None
            return list(self._found)

    def _new(self) -> Iterator[str]:
        while self._fd >= 0:
            try:
                record = os.read(self._fd, 8192).decode(errors="replace")
            except BrokenPipeError:
                continue  # overwritten while it was read: continue with the next
            except OSError:
                return  # no more
            if (number := _NUMBER.match(record)) is not None:
                self.lost += max(0, int(number[1]) - self._next)
                self._next = int(number[1]) + 1
            yield record


_LOG = _KernelLog()


def _xids(records: Iterable[str]) -> list[tuple[str, int]]:
    """(PCI address, number) of each, in records as /dev/kmsg has them."""
    found = []
    for record in records:
        if "Xid" in record and (start := _RECORD.match(record)):
            found += _xid(record, start.end())
    return found


def _xids_in(log: str) -> list[tuple[str, int]]:
    """The same in a file. Raises UsageError where it is unknown where in it a record begins."""
    lines = log.split("\n")
    if _RECORD.match(lines[0]):
        return _xids(lines)
    if log and not _LINE.match(lines[0]):
        # Without times, a line that a user's text continues on looks like a record.
        raise UsageError(
            "the kernel's log has no times as dmesg writes them", "write it by: dmesg -k > FILE"
        )
    found, time_s, is_nvidia = [], "", False
    for line in lines:
        start = _LINE.match(line)
        if start is None:
            continue
        if start[1] != time_s:  # else a record goes on: dmesg -S repeats its time
            time_s, is_nvidia = start[1], line.startswith("NVRM:", start.end())
        if is_nvidia:
            found += _xid(line, start.end())
    return found


def _xid(line: str, at: int) -> list[tuple[str, int]]:
    """The one that begins there; none where it does not."""
    one = _XID.match(line, at)
    return [(one[1].lower(), int(one[2]))] if one else []


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
