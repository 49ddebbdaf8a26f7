# SPDX-License-Identifier: Apache-2.0
"""Host memory by stack: what is mapped, what is unmapped of it, and what is touched first.

Off unless asked for: it runs on every page fault and at the end of every system call.
"""

from __future__ import annotations

import platform
import struct
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from sonde import procfs
from sonde.collect.attached import Attached
from sonde.collect.collector import Batch
from sonde.collect.host.shares import share_out
from sonde.collect.kernel import BpfObject, Kernel, expect_fields, refusal
from sonde.errors import KernelUnsupported
from sonde.procfs import START_UNIT_NS

SUPPORTED_MACHINES = ("x86_64",)
"""Whose system calls bpf/memory.bpf.c reads."""

FIELDS = (
    *("tgid", "tid", "start_ns", "stack_id", "kind", "is_freed"),
    *("count", "bytes", "weight_count", "weight_bytes"),
)
MAPPING_FIELDS = (
    *("address", "tgid"),
    *("start_ns", "stack_id", "bytes", "tid", "weight", "kind", "is_part", "party"),
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
"""`enum memory_kind`: kind and name of a row (reserved: mapped without access)."""
OTHER: Final = ("other", "")
"""Of what was counted for all processes together, whatever it was."""
PROGRAMS: Final = (
    *("on_call", "on_user_fault", "on_kernel_fault", "on_pages", "on_end", "on_fork"),
)
MAX_PIECES: Final = 16
"""What is left of one mapping around its holes is followed in at most this many pieces."""
MOST_MAPPINGS: Final = 16_384
"""Mappings and pieces that are followed (bpf/memory_mappings.h)."""
PIECES_UP_TO: Final = MOST_MAPPINGS // 4 * 3
"""Together with the mappings, pieces beyond the first of each take no more: the rest is for
mappings of others (`may_follow` in bpf/memory_mappings.h)."""
LEAST_PIECES: Final = MOST_MAPPINGS // 16
"""Such pieces have at least this much, also where mappings alone are more than that."""
Row = tuple[int, ...]
"""The fields `MAPPING_FIELDS`."""
Range = tuple[int, int]
"""Addresses: the first one, and the one behind the last."""
COMPARE_SHARE: Final = 0.01
"""Of a CPU, at the most, for comparing the mappings that are followed with /proc/PID/maps."""
COMPARE_CREDIT_S: Final = 0.05
"""CPU time for that which can be saved up: on a quiet machine there is enough at each chunk's
end."""

MAX_COMPARE_S: Final = 0.5
"""CPU time of one comparison, after which what was not read counts as mapped still."""
_ALL: Final = 1 << 64
"""Behind the last address."""


class MemoryCollector(Attached):
    """Rows of `activity` (exact) and `sample` (with stacks): mapped, unmapped, faulted.

    An `unmapped` row of `sample` names the stack that had mapped what is gone.
    """

    name = "memory"

    @staticmethod
    def bpf_object(*, stack_gap_ns: int) -> BpfObject:
        """What is loaded into the kernel for it."""
        return BpfObject("memory", {"stack_gap_ns": stack_gap_ns})

    def __init__(self, kernel: Kernel, *, stack_gap_ns: int) -> None:
        """`stack_gap_ns`: between two stacks of a thread, at the least. Raises KernelUnsupported,
        OSError."""
        if platform.machine() not in SUPPORTED_MACHINES:
            raise KernelUnsupported(
                f"memory by stack is read on x86-64 alone, and this is {platform.machine()}",
                "leave out --memory",
            )
        super().__init__(kernel.load(self.bpf_object(stack_gap_ns=stack_gap_ns)))
        self._credit_s = COMPARE_CREDIT_S
        self._credited_s = time.monotonic()
        self._unfollowed = 0
        """Mappings, or pieces of them, that are not followed any more."""
        self._unread = 0
        """Times that not all of what a process has mapped was read."""
        self._compare_until_s = 0.0
        """This thread's CPU time at which a comparison reads no more."""
        self._parties: set[int] = set()
        """Of the mappings that were followed at the last comparison; without the machine's root."""
        self._unowned_ends: set[tuple[int, int, int]] = set()
        """Ends that no mapping had at the last comparison: pid, first address, address behind."""
        self._sum: int | None = None
        expect_fields(self._bpf, "memory", FIELDS)

    def start(self) -> None:
        """Record where the heap (brk) of each process ends, then follow faults and calls. Raises
        HostError."""
        try:
            self._sum = self._bpf.attach("on_sum") if self._sum is None else self._sum
            scan = self._bpf.attach("on_scan")
            self._links = [self._bpf.attach(program) for program in reversed(PROGRAMS)]
            self._bpf.walk(scan)
            self._bpf.detach(scan)
        except OSError as error:
            raise refusal(error) from error

    def drain(self, since_ns: int, to_the_end: bool) -> Batch:
        """What was mapped, unmapped and touched since the last tick."""
        batch = Batch()
        if to_the_end and self._sum is not None:
            self._iterators.run(self._sum)
        for row in self._bpf.drain("memory"):
            pid, tid, start, stack_id, number, is_freed, *sums = row
            kind, name = KINDS.get(number, OTHER)
            self._add(batch, since_ns, ("unmapped" if is_freed else kind, name), *sums,
                      who=(pid, start - start % START_UNIT_NS, tid), stack_id=stack_id,
                      is_total=not is_freed)  # fmt: skip
        if to_the_end:
            self._compare_when_due(batch, since_ns)
        return batch

    def _compare_when_due(self, batch: Batch, since_ns: int) -> None:
        now_s = time.monotonic()
        earned_s = COMPARE_SHARE * (now_s - self._credited_s)
        self._credit_s = min(COMPARE_CREDIT_S, self._credit_s + earned_s)
        self._credited_s = now_s
        if self._credit_s > 0:
            began_s = time.thread_time()
            self._compare_until_s = began_s + MAX_COMPARE_S
            self._compare(batch, since_ns)
            self._credit_s -= time.thread_time() - began_s

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
            totals = (count, 0, size, 0, 0, 0)
            batch.add("activity", (since_ns, *what, "", "", "", 0, *who, *totals))
        if stack_id:
            weights = (float(weight_count), 0.0, float(weight_bytes))
            batch.add("sample", (since_ns, *what, *who, stack_id, *weights))
            batch.stacks[stack_id] = who[:2]

    def _compare(self, batch: Batch, since_ns: int) -> None:
        """Report as unmapped what went in a way the BPF programs do not follow.

        For example the middle of a mapping, or all of it by an exec. What a process had mapped when
        it ended is not reported: the rows are to show what it had come to hold.
        """
        space: dict[tuple[int, int], list[Range] | None] = {}
        followed: Counter[int] = Counter()
        standing: list[tuple[int, int, int, int]] = []
        """Pieces that are as they were: address, pid, size in bytes, party."""
        changed: list[tuple[Row, list[Range] | None]] = []
        wanted: Counter[int] = Counter()
        """Pieces by party, but the first of each mapping."""
        mappings = 0
        # Read before the mappings: of one that is followed meanwhile the end is not among them.
        ends = {(pid, since, until) for until, pid, since in self._bpf.entries("mapping_ends")}
        for entry in self._bpf.entries("mappings"):
            address, pid, start, _, size, _, _, _, is_part, party = entry
            ends.discard((pid, address, address + size))
            start_ns = start - start % START_UNIT_NS
            key = (pid, start_ns)
            if address + size >= _ALL:  # no mapping is this large: the entry is wrong
                self._unfollowed += 1
                self._forget(pid, address, size)
                continue
            if key not in space:
                space[key] = self._space_of(pid, start_ns)
            ranges = space[key]
            pieces = None if ranges is None else pieces_of(ranges, address, address + size)
            if pieces != [(address, address + size)]:
                changed.append((entry, pieces))
                pieces = pieces or []
            elif is_part:
                standing.append((address, pid, size, party))
            else:
                followed[party] += 1
            first = 0 if is_part or not pieces else 1
            mappings += first
            wanted[party] += min(len(pieces), MAX_PIECES) - first
        room = pieces_by_party(wanted, mappings)
        for address, pid, size, party in standing:
            if room[party]:
                room[party] -= 1
                followed[party] += 1
            else:
                self._unfollowed += 1
                self._forget(pid, address, size)
        for entry, pieces in changed:
            self._divide(batch, since_ns, entry, pieces, room, followed)
        self._sweep_ends(ends)
        self._count_followed(followed)

    def _divide(
        self,
        batch: Batch,
        since_ns: int,
        entry: Row,
        pieces: Sequence[Range] | None,
        room: Counter[int],
        followed: Counter[int],
    ) -> None:
        """Follow what is left of a mapping, and report the rest as unmapped. `pieces`: None where
        its process is gone; `room`: for how many pieces of each party there is room still."""
        address, pid, start, stack_id, size, tid, weight, number, is_part, party = entry
        if not self._forget(pid, address, size) or pieces is None:
            return  # it was unmapped just now, which a program saw, or its process is gone
        for index, (since, until) in enumerate(pieces):
            is_piece = bool(is_part or index)
            if index >= MAX_PIECES or (is_piece and not room[party]):
                self._unfollowed += len(pieces) - index
                break
            room[party] -= is_piece
            followed[party] += 1
            whose = (start, stack_id, until - since, tid, weight, number)
            self._follow(pid, since, until, (*whose, is_piece, party))
        gone = size - sum(until - since for since, until in pieces)
        self._add(batch, since_ns, ("unmapped", KINDS[number][1]), 0, 0,
                  0 if pieces or is_part else weight, weight * gone,
                  who=(pid, start - start % START_UNIT_NS, tid), stack_id=stack_id,
                  is_total=False)  # fmt: skip

    def _forget(self, pid: int, address: int, size: int) -> bool:
        """Have a mapping or piece of `size` bytes followed no more; returns whether it was."""
        with suppress(FileNotFoundError):
            self._bpf.delete_hash("mapping_ends", _place(address + size, pid))
        try:
            self._bpf.delete_hash("mappings", _place(address, pid))
        except FileNotFoundError:
            return False
        return True

    def _sweep_ends(self, unowned: set[tuple[int, int, int]]) -> None:
        """Delete ends that no mapping had at this comparison nor at the last one. Seen once, it may
        be that of a mapping that went meanwhile, and another one may have it by now."""
        for pid, _, until in unowned & self._unowned_ends:
            with suppress(FileNotFoundError):
                self._bpf.delete_hash("mapping_ends", _place(until, pid))
        self._unowned_ends = unowned

    def _count_followed(self, followed: Mapping[int, int]) -> None:
        """How many mappings of each party the BPF programs count from now on. What they began to
        follow meanwhile is missing until the next comparison."""
        self._bpf.set_hash("mappings_followed", bytes(4), struct.pack("=Q", sum(followed.values())))
        for party in self._parties.difference(followed):
            with suppress(FileNotFoundError):  # it was the longest unused of too many
                self._bpf.delete_hash("mapping_parties", struct.pack("=Q", party))
        self._parties = {party for party in followed if party}
        for party in self._parties:
            self._bpf.set_hash("mapping_parties", struct.pack("=Q", party),
                               struct.pack("=Q", followed[party]))  # fmt: skip

    def _follow(self, pid: int, since: int, until: int, mapping: tuple[int, ...]) -> None:
        """Have a piece that is left of a mapping followed; `mapping`: the fields of `struct
        memory_mapping`."""
        try:
            self._bpf.set_hash("mappings", _place(since, pid), struct.pack("=QQQIIIIQ", *mapping))
            self._bpf.set_hash("mapping_ends", _place(until, pid), struct.pack("=Q", since))
        except OSError:  # the maps are full
            self._unfollowed += 1

    def _space_of(self, pid: int, start_ns: int) -> list[Range] | None:
        """Ranges that a process has mapped, ascending; None where it is gone.

        What is not in them counts as unmapped, so what was not read is put in as mapped.
        """
        if time.thread_time() >= self._compare_until_s:
            self._unread += 1
            return [(0, _ALL)]
        found: list[Range] = []
        try:
            with procfs.MapsReader(pid) as reader:
                for line in reader.lines():
                    begin, _, end = line.split(b" ", 1)[0].partition(b"-")
                    since, until = int(begin, 16), int(end, 16)
                    if found and found[-1][1] == since:
                        since = found.pop()[0]
                    found.append((since, until))
                if reader.is_cut:
                    self._unread += 1
                    found.append((found[-1][1] if found else 0, _ALL))
        except OSError:
            return None
        stat = procfs.read_stat(pid)
        if not found or stat is None or stat.start_ns != start_ns:
            return None
        return found

    def losses(self) -> Mapping[str, int]:
        """Losses so far by name."""
        found = dict(super().losses())
        if self._unfollowed:
            found["mappings"] = found.get("mappings", 0) + self._unfollowed
        if self._unread:
            found["processes_unread"] = self._unread
        return found


def _place(address: int, pid: int) -> bytes:
    """`struct memory_place`"""
    return struct.pack("=QII", address, pid, 0)


def pieces_by_party(wanted: Counter[int], mappings: int) -> Counter[int]:
    """How many pieces of each party are followed beside a number of mappings: all that are
    `wanted`, else as many of each party as of every other that wants that many."""
    room = max(LEAST_PIECES, PIECES_UP_TO - mappings)
    if wanted.total() <= room:
        return Counter(wanted)
    each = ((party, party) for party in wanted.elements())
    return Counter(share_out(each, room, lambda _: True))


def pieces_of(ranges: Sequence[Range], begin: int, end: int) -> list[Range]:
    """What of [begin, end) lies in ascending ranges."""
    found = []
    for index in range(bisect_right(ranges, begin, key=lambda it: it[1]), len(ranges)):
        since, until = ranges[index]
        if since >= end:
            break
        found.append((max(begin, since), min(end, until)))
    return found
