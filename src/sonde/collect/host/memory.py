# SPDX-License-Identifier: Apache-2.0
"""Memory, faults, reclaim, and where memory lies: /proc/vmstat, /proc/meminfo, NUMA nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sonde.collect.host.files import Counters, KernelFile, labels, table
from sonde.collect.polling import NORMAL_S, SLOW_S, Points, Poll, SourceUnavailable

NODES = Path("/sys/devices/system/node")

# Counters of /proc/vmstat, by name.
VMSTAT = {
    "pgfault": ("system.paging.faults", "minor"),
    "pgmajfault": ("system.paging.faults", "major"),
    "pswpin": ("system.paging.operations", "in"),
    "pswpout": ("system.paging.operations", "out"),
}
"""Series and a label's value."""
RECLAIM = {
    "pgscan_kswapd": ("scanned", "kswapd"),
    "pgscan_direct": ("scanned", "direct"),
    "pgscan_khugepaged": ("scanned", "khugepaged"),
    "pgscan_proactive": ("scanned", "proactive"),
    "pgsteal_kswapd": ("freed", "kswapd"),
    "pgsteal_direct": ("freed", "direct"),
    "pgsteal_khugepaged": ("freed", "khugepaged"),
    "pgsteal_proactive": ("freed", "proactive"),
}
"""What happened to pages, and who did it."""
OTHER = {
    "oom_kill": "sonde.host.oom_kills",
    "compact_stall": "sonde.host.compaction.stalls",
    "numa_hint_faults": "sonde.host.numa.hint_faults",
    "numa_pages_migrated": "sonde.host.numa.migrated",
    "workingset_refault_file": "sonde.host.refaults",
}
STALLS = [f"allocstall_{zone}" for zone in ("dma", "dma32", "normal", "movable", "device")]
"""Allocations that had to reclaim memory themselves, by zone; they are summed."""
_WANTED = frozenset(name.encode() for name in (*VMSTAT, *RECLAIM, *OTHER, *STALLS))
MEMINFO = {
    "MemFree": "free",
    "Buffers": "buffers",
    "Cached": "cached",
    "Slab": "slab",
    "Dirty": "dirty",
    "Writeback": "writeback",
}
"""States of memory, by name in /proc/meminfo."""
NUMASTAT = {
    "numa_hit": "hit",
    "numa_miss": "miss",
    "numa_foreign": "foreign",
    "local_node": "local",
    "other_node": "other",
}


class Memory:
    """How memory is used, faulted in and reclaimed, on the machine and on each NUMA node."""

    name = "memory"

    def __init__(self) -> None:
        self._vmstat = KernelFile("/proc/vmstat")
        self._meminfo = KernelFile("/proc/meminfo")
        self._nodes: dict[int, tuple[KernelFile, KernelFile]] = {}
        self._counters = Counters()

    def open(self) -> None:
        """Find the nodes. Raises SourceUnavailable."""
        if not self._vmstat.read():
            raise SourceUnavailable("/proc/vmstat is empty", whole=True)
        self._nodes = {
            int(node.name[4:]): (KernelFile(node / "numastat"), KernelFile(node / "meminfo"))
            for node in sorted(NODES.glob("node[0-9]*"))
        }

    def polls(self) -> Sequence[Poll]:
        """Faults and reclaim every second, sizes and nodes less often."""
        return [
            Poll("vmstat", NORMAL_S, self._read_vmstat),
            Poll("meminfo", SLOW_S, self._read_meminfo),
            Poll("nodes", SLOW_S, self._read_nodes),
        ]

    def close(self) -> None:
        """Close every file."""
        for file in (self._vmstat, self._meminfo, *sum(self._nodes.values(), ())):
            file.close()

    def _read_vmstat(self, points: Points) -> None:
        found = table(self._vmstat.read(), _WANTED)
        report = self._counters.report
        faults = found.get("pgfault", 0), found.get("pgmajfault", 0)
        for name, (series, kind) in VMSTAT.items():
            if name in found:
                value = faults[0] - faults[1] if name == "pgfault" else found[name]
                key = "fault__type" if series.endswith("faults") else "direction"
                label = labels(**{f"system__paging__{key}": kind})
                report(points, series, value, label)
        for name, (what, who) in RECLAIM.items():
            if name in found:
                label = labels(sonde__reclaim=what, sonde__reclaim__by=who)
                report(points, "sonde.host.reclaim.pages", found[name], label)
        stalls = sum(value for name, value in found.items() if name in STALLS)
        report(points, "sonde.host.reclaim.stalls", stalls)
        for name, series in OTHER.items():
            if name in found:
                report(points, series, found[name])

    def _read_meminfo(self, points: Points) -> None:
        found = _meminfo(self._meminfo.read())
        used = found.get("MemTotal", 0) - sum(
            found.get(name, 0) for name in ("MemFree", "Buffers", "Cached", "SReclaimable")
        )
        points.add("system.memory.limit", found.get("MemTotal", 0))
        points.add("sonde.host.memory.available", found.get("MemAvailable", 0))
        points.add("system.memory.usage", used, labels(system__memory__state="used"))
        for name, state in MEMINFO.items():
            if name in found:
                label = labels(system__memory__state=state)
                points.add("system.memory.usage", found[name], label)

    def _read_nodes(self, points: Points) -> None:
        for number, (numastat, meminfo) in self._nodes.items():
            for name, value in table(numastat.read()).items():
                if name in NUMASTAT:
                    label = labels(sonde__numa__node=number, sonde__numa__allocation=NUMASTAT[name])
                    self._counters.report(points, "sonde.host.numa.allocations", value, label)
            found = _meminfo(meminfo.read())
            for name, state in (("MemFree", "free"), ("MemUsed", "used")):
                if name in found:
                    label = labels(sonde__numa__node=number, system__memory__state=state)
                    points.add("sonde.host.numa.memory", found[name], label)


def _meminfo(raw: bytes) -> dict[str, int]:
    """Bytes by name; a line of a NUMA node has `Node N` before the name."""
    found = {}
    for line in raw.decode("ascii", "replace").split("\n"):
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name.rpartition(" ")[2]] = int(words[0]) * (1024 if len(words) > 1 else 1)
    return found
