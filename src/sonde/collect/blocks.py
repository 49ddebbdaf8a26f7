# SPDX-License-Identifier: Apache-2.0
"""Block devices by process and by control group: requests, bytes, time in queue and in device."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from sonde import _native, procfs
from sonde.collect.attached import Attached
from sonde.collect.collector import Batch
from sonde.collect.kernel import BpfObject, Kernel, expect_fields, refusal
from sonde.procfs import START_UNIT_NS

FIELDS = (
    *("tgid", "device", "start_ns", "cgroup", "hierarchy", "operation"),
    *("count", "bytes", "queue_ns", "device_ns", "max_ns"),
)
OPERATIONS = {0: "read", 1: "write", 2: "flush", 3: "discard", 5: "erase", 9: "zero"}
"""enum req_op of linux/blk_types.h"""
MINOR_BITS = 20
"""Of the kernel's dev_t (MINORBITS of linux/kdev_t.h)."""
ROWS = 4_096
"""Of the map `requests`: by process, control group, device and operation."""
FREE_DIVISOR = 4
"""Each second (2^30 ns) anybody may insert new rows up to this part of all (bpf/share.h)."""
PARTY_DIVISOR = 16
"""Besides, each user or container may insert rows up to this part of all."""
OLD_PROGRAMS = ("on_first_issue", "on_complete")
NEW_PROGRAMS = ("on_start", "on_done", "on_issue")
"""Where the kernel has the tracepoint block_io_start (Linux 6.5)."""


class BlockCollector(Attached):
    """Rows of `activity`: kind block, and its part block-queue, named after the device.

    A request that a kernel thread submitted has no process but a control group: it is in
    `Batch.group_io` alone. So is one that found no row in the full map, counted by device alone.
    """

    name = "blocks"

    @staticmethod
    def bpf_object() -> BpfObject:
        """What is loaded into the kernel for it."""
        shares = {
            "free_rows": ROWS // FREE_DIVISOR,
            "most_rows_of_one_party": ROWS // PARTY_DIVISOR,
        }
        skip = OLD_PROGRAMS if _has_start() else NEW_PROGRAMS
        return BpfObject("blocks", shares, skip, {"requests": ROWS}, takes_stacks=False)

    def __init__(self, kernel: Kernel) -> None:
        self._programs = NEW_PROGRAMS if _has_start() else OLD_PROGRAMS
        super().__init__(kernel.load(self.bpf_object()))
        self._devices: dict[int, str] = {}
        """Names by number, as of their first request: of a number that is used again, the old
        one."""
        expect_fields(self._bpf, "requests", FIELDS)

    def start(self) -> None:
        """Follow every request. The probe on its begin is attached last, so that none is seen
        without its end. Raises HostError."""
        try:
            self._links = [self._bpf.attach(program) for program in reversed(self._programs)]
        except OSError as error:
            raise refusal(error) from error

    def drain(self, since_ns: int, to_the_end: bool) -> Batch:
        """Requests that were completed since the last tick."""
        batch = Batch()
        groups: dict[tuple[int, int, str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        for row in self._bpf.drain("requests"):
            pid, device, start, group, hierarchy, number, *sums = row
            count, size, queue_ns, device_ns, max_ns = sums
            name, operation = self._device(device), OPERATIONS.get(number, f"operation {number}")
            of_group = groups[hierarchy, group, name, operation]
            for i, value in enumerate((count, size, queue_ns, device_ns)):
                of_group[i] += value
            batch.seen += count
            if not pid:
                continue
            start_ns = start - start % START_UNIT_NS
            who = (pid, start_ns, pid)
            batch.threads.add(who)
            for kind, ns, longest in (
                ("block", queue_ns + device_ns, max_ns),
                ("block-queue", queue_ns, 0),
            ):
                totals = (count, ns, size, longest, 0, 0)
                batch.add("activity", (since_ns, kind, name, "", operation, "", 0, *who, *totals))
        batch.group_io = {key: (a, b, c, d) for key, (a, b, c, d) in groups.items()}
        return batch

    def _device(self, number: int) -> str:
        name = self._devices.get(number)
        if name is None:
            major, minor = number >> MINOR_BITS, number & ((1 << MINOR_BITS) - 1)
            link = Path(f"/sys/dev/block/{major}:{minor}")
            try:
                name = procfs.printable(link.readlink().name)
            except OSError:
                name = f"{major}:{minor}"
            self._devices[number] = name
        return name


def _has_start() -> bool:
    return _native.tracepoint_arguments("block_io_start") is not None
