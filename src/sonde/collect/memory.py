# SPDX-License-Identifier: Apache-2.0
"""Host memory by stack: what is mapped, what is unmapped of it, and what is touched first.

Off unless asked for: it runs on every page fault and at the end of every system call.
"""

from __future__ import annotations

import struct
import time
from bisect import bisect_right
from pathlib import Path
from typing import Final

from sonde import procfs
from sonde.collect.attached import Attached
from sonde.collect.collector import Batch
from sonde.collect.kernel import Kernel, expect_fields, refusal
from sonde.procfs import START_UNIT_NS

FIELDS = (
    *("tgid", "tid", "start_ns", "stack_id", "kind", "is_freed"),
    *("count", "bytes", "weight_count", "weight_bytes"),
)
MAPPING_FIELDS = (
    *("address", "tgid"),
    *("start_ns", "stack_id", "bytes", "tid", "weight", "kind"),
)
KINDS: Final = {
    1: ("faulted", "read"),
    2: ("faulted", "write"),
    3: ("faulted", "copy"),
    4: ("mapped", "anonymous"),
    5: ("mapped", "shared"),
    6: ("mapped", "file"),
    7: ("mapped", "reserved"),
    8: ("mapped", "heap"),
    9: ("unmapped", ""),
}
"""`enum memory_kind`: kind and name of a row."""
PROGRAMS: Final = (
    *("on_call", "on_user_fault", "on_kernel_fault", "on_pages", "on_end", "on_fork"),
)
COMPARE_SHARE: Final = 0.01
"""Of the time, at the most, that goes into holding what is followed against /proc/PID/maps."""


class MemoryCollector(Attached):
    """Rows of `activity` (exact) and `sample` (with stacks): mapped, unmapped, faulted.

    An `unmapped` row of `sample` names the stack that had mapped what is gone.
    """

    name = "memory"

    def __init__(self, kernel: Kernel, *, stack_gap_ns: int) -> None:
        super().__init__(kernel.load("memory", {"stack_gap_ns": stack_gap_ns}))
        self._compare_after_s = 0.0
        self._sum: int | None = None
        expect_fields(self._bpf, "memory", FIELDS)

    def start(self) -> None:
        """Note where heaps end, then follow faults and calls."""
        try:
            self._sum = self._bpf.attach("on_sum") if self._sum is None else self._sum
            walk = self._bpf.attach("on_walk")
            self._links = [self._bpf.attach(program) for program in reversed(PROGRAMS)]
            self._bpf.walk(walk)
            self._bpf.detach(walk)
        except OSError as error:
            raise refusal(error) from error

    def drain(self, since_ns: int, to_the_end: bool) -> Batch:
        """What was mapped, unmapped and touched since the last tick."""
        batch = Batch()
        if to_the_end and self._sum is not None:
            self._bpf.walk(self._sum)
        for row in self._bpf.drain("memory"):
            pid, tid, start, stack_id, number, is_freed, *sums = row
            kind, name = KINDS[number]
            self._add(batch, since_ns, ("unmapped" if is_freed else kind, name), *sums,
                      who=(pid, start - start % START_UNIT_NS, tid), stack_id=stack_id,
                      is_total=not is_freed)  # fmt: skip
        began_s = time.monotonic()
        if to_the_end and began_s > self._compare_after_s:
            self._compare(batch, since_ns)
            now_s = time.monotonic()
            self._compare_after_s = now_s + (now_s - began_s) / COMPARE_SHARE
        return batch

    def _add(
        self,
        batch: Batch,
        since_ns: int,
        what: tuple[str, str],
        count: int,
        size: int,
        weight_count: int,
        weight_bytes: int,
        *,
        who: tuple[int, int, int],
        stack_id: int,
        is_total: bool,
    ) -> None:
        batch.threads.add(who)
        if is_total:
            batch.seen += count
            rest = (count, 0, size, 0, 0, 0)
            batch.add("activity", (since_ns, *what, "", "", "", 0, *who, *rest))
        if stack_id:
            weights = (float(weight_count), 0.0, float(weight_bytes))
            batch.add("sample", (since_ns, *what, *who, stack_id, *weights))
            batch.stacks[stack_id] = who[:2]

    def _compare(self, batch: Batch, since_ns: int) -> None:
        """Take back what was unmapped in a way the programs could not follow.

        The middle of a mapping, say, or all of it by an exec. What a process held when it ended
        stays as it was: that is what it had come to hold.
        """
        space: dict[tuple[int, int], list[tuple[int, int]] | None] = {}
        for address, pid, start, stack_id, size, tid, weight, number in self._bpf.entries(
            "mappings"
        ):
            start_ns = start - start % START_UNIT_NS
            key = (pid, start_ns)
            if key not in space:
                space[key] = _space_of(pid, start_ns)
            ranges = space[key]
            held = size if ranges is None else _overlap(ranges, address, address + size)
            if ranges is not None and held == size:
                continue
            self._bpf.delete_hash("mappings", struct.pack("=QII", address, pid, 0))
            self._bpf.delete_hash("mapping_ends", struct.pack("=QII", address + size, pid, 0))
            if ranges is None:
                continue
            if held:
                value = (start, stack_id, held, tid, weight, number, 0)
                self._bpf.set_hash(
                    "mappings",
                    struct.pack("=QII", address, pid, 0),
                    struct.pack("=QQQIIII", *value),
                )
            gone = size - held
            self._add(batch, since_ns, ("unmapped", KINDS[number][1]), 0, 0,
                      0 if held else weight, weight * gone,
                      who=(pid, start_ns, tid), stack_id=stack_id, is_total=False)  # fmt: skip


def _space_of(pid: int, start_ns: int) -> list[tuple[int, int]] | None:
    """Ranges that a process has mapped, ascending; None where it is gone."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_bytes()  # all of it: what is not in it is gone
    except OSError:
        return None
    stat = procfs.read_stat(pid)
    if not maps or stat is None or stat.start_ns != start_ns:
        return None
    found: list[tuple[int, int]] = []
    for line in maps.splitlines():
        begin, _, end = line.split(b" ", 1)[0].partition(b"-")
        since, until = int(begin, 16), int(end, 16)
        if found and found[-1][1] == since:
            since = found.pop()[0]
        found.append((since, until))
    return found


def _overlap(ranges: list[tuple[int, int]], begin: int, end: int) -> int:
    """Bytes of [begin, end) that lie in ascending ranges."""
    held = 0
    for since, until in ranges[bisect_right(ranges, begin, key=lambda it: it[1]) :]:
        if since >= end:
            break
        held += min(end, until) - max(begin, since)
    return held
