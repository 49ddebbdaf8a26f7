# SPDX-License-Identifier: Apache-2.0
"""What devices, and processes on them, did of late: points of metrics as records of a moment.

Points come once a second, and each has the time at which it was read. Those of a quarter of a
second are one record.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from sonde.diagnose.moments import DeviceShare, DeviceUse
from sonde.metrics import MetricRow

BIN_NS: Final = 250_000_000
MAX_DEVICES: Final = 64
"""Of which points are read: the first that come, of a tick."""
MAX_SHARES: Final = 1_024
"""Records of processes in one tick; more are left out."""
MAX_LABELS: Final = 4_096
"""Label texts whose content is remembered."""
DEVICE_FIELDS: Final = {
    ("hw.gpu.utilization", "general"): "busy",
    ("sonde.gpu.memory.busy", ""): "memory_busy",
    ("hw.gpu.memory.usage", ""): "memory_used",
    ("hw.gpu.memory.limit", ""): "memory_total",
    ("sonde.gpu.clock", "sm"): "clock_hz",
    ("sonde.gpu.sm.active", ""): "sm_active",
    ("sonde.gpu.dram.active", ""): "dram_active",
    ("sonde.gpu.pcie.throughput", "receive"): "bytes_in",
    ("sonde.gpu.pcie.throughput", "transmit"): "bytes_out",
}
"""Fields of `DeviceUse` by series and the attribute that distinguishes its kinds."""
SHARE_FIELDS: Final = {
    ("sonde.process.gpu.utilization", "sm"): "busy",
    ("sonde.process.gpu.utilization", "memory"): "memory_busy",
    ("sonde.process.gpu.memory", ""): "memory_bytes",
}
"""The same of `DeviceShare`."""
THROTTLED: Final = "sonde.gpu.throttled"
SERIES: Final = frozenset(name for name, _ in (*DEVICE_FIELDS, *SHARE_FIELDS)) | {THROTTLED}
KIND_LABELS: Final = (
    *("hw.gpu.task", "sonde.gpu.clock.domain", "network.io.direction", "sonde.gpu.engine"),
    "sonde.gpu.throttle.reason",
)

_Labels = tuple[str, str, int]
"""Device, kind, pid."""


class DeviceReader:
    """Collects points of a tick."""

    def __init__(self) -> None:
        self._labels: dict[str, _Labels] = {}
        self._uses: dict[tuple[str, int], DeviceUse] = {}
        """By device and time (`BIN_NS`)."""
        self._shares: dict[tuple[int, str, int], DeviceShare] = {}
        self._means: dict[tuple[int, str], tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        """Sum and count by record (its id) and field."""
        self._throttled: dict[str, dict[str, bool]] = {}
        """By device: whether each reason holds, reported when it changes."""
        self._total: dict[str, float] = {}
        """Bytes of memory by device: read once a second."""
        self._known: set[str] = set()
        self.left_out = 0
        """Points for which there was no room."""

    def take(self, rows: Iterable[MetricRow]) -> None:
        """Take in points."""
        for time_ns, series, text, value in rows:
            if series not in SERIES or not math.isfinite(value):
                continue
            device, kind, pid = self._read(text)
            if not device or not self._has_room(device):
                continue
            if series == THROTTLED:
                self._throttled.setdefault(device, {})[kind] = value > 0
            elif (field := DEVICE_FIELDS.get((series, kind))) is not None:
                self._add(self._use(device, time_ns), field, value)
            elif pid and (field := SHARE_FIELDS.get((series, kind))) is not None:
                share = self._share(pid, device, time_ns)
                if share is not None:
                    self._add(share, field, value)

    def give(self) -> tuple[list[DeviceUse], list[tuple[int, DeviceShare]]]:
        """The records since the last call: of devices, and of processes with their pids."""
        uses, shares = list(self._uses.values()), self._shares
        for use in uses:
            reasons = self._throttled.get(use.device, {})
            use.throttled = sorted(reason for reason, holds in reasons.items() if holds)
            if use.memory_total > 0:
                self._total[use.device] = use.memory_total
            else:
                use.memory_total = self._total.get(use.device, -1.0)
        self._uses, self._shares = {}, {}
        self._means.clear()
        return uses, [(pid, share) for (pid, _, _), share in shares.items()]

    def _add(self, record: DeviceUse | DeviceShare, field: str, value: float) -> None:
        total, count = self._means[id(record), field]
        self._means[id(record), field] = total + value, count + 1
        setattr(record, field, (total + value) / (count + 1))

    def _use(self, device: str, time_ns: int) -> DeviceUse:
        key = device, time_ns // BIN_NS
        use = self._uses.get(key)
        if use is None:
            use = self._uses[key] = DeviceUse(device, time_ns)
        use.time_ns = max(use.time_ns, time_ns)
        return use

    def _share(self, pid: int, device: str, time_ns: int) -> DeviceShare | None:
        key = pid, device, time_ns // BIN_NS
        share = self._shares.get(key)
        if share is None:
            if len(self._shares) >= MAX_SHARES:
                self.left_out += 1
                return None
            share = self._shares[key] = DeviceShare(device, time_ns)
        return share

    def _has_room(self, device: str) -> bool:
        if device not in self._known:
            if len(self._known) >= MAX_DEVICES:
                self.left_out += 1
                return False
            self._known.add(device)
        return True

    def _read(self, text: str) -> _Labels:
        known = self._labels.get(text)
        if known is None:
            found = json.loads(text) if text else {}
            pid = str(found.get("process.pid", ""))
            kind = next((str(found[name]) for name in KIND_LABELS if name in found), "")
            device = str(found.get("hw.id", ""))
            known = device, kind, int(pid) if pid.isdigit() and len(pid) < 12 else 0
            while len(self._labels) >= MAX_LABELS:
                del self._labels[next(iter(self._labels))]
            self._labels[text] = known
        return known
