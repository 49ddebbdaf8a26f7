# SPDX-License-Identifier: Apache-2.0
"""Device calls: what processes ask of their GPUs, by which function, with how many bytes.

Files that carry a device API are found through the mappings of processes: all that are mapped at
the start, those the dynamic linker knows (before anyone maps them, so that a process that lives
50 ms is seen whole), and each new one as soon as a process maps it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from sonde import _native
from sonde._native import ProcessEvent
from sonde.apis import Api
from sonde.collect.collector import Batch, Collector
from sonde.collect.discovery import Discovery
from sonde.collect.kernel import (
    BpfObject,
    Iterators,
    Kernel,
    by_cpus,
    expect_fields,
    has_uprobe_multi,
    refusal,
)
from sonde.collect.mapped_files import FileKey
from sonde.collect.plain_files import PlainFiles
from sonde.collect.probe_duty import DutyCycle, What, Who
from sonde.collect.probes import Probes
from sonde.collect.waiting_files import FileBudget
from sonde.model.calls import STATUS_UNKNOWN
from sonde.model.rows import EventRow
from sonde.procfs import START_UNIT_NS

FIELDS = (
    *("tgid", "tid", "start_ns", "stack_id", "site", "status", "direction", "flags"),
    *("count", "nested", "ns", "bytes", "weight_count", "weight_ns", "weight_bytes", "max_ns"),
)
SPANS_A_TICK = 20_000
"""Single calls that are drained at a time."""
CALL_GOING_ON = 2
"""Flag of rows that hold the time of calls which have not returned (abi/events.h)."""
ROWS: Final = 16_384
"""Of the map `device_calls`, on a machine with many CPUs (`by_cpus`)."""
FREE_DIVISOR: Final = 4
PARTY_DIVISOR: Final = 16
"""Each second anybody may insert new rows up to a quarter of all, and besides each user or
container up to a sixteenth (bpf/share.h). The time from drain to drain touches two such seconds."""
_LARGEST = 2**62 - 1
"""Rows with larger numbers are left out when a capture is read (query/validation.py)."""
MOST_ENDED: Final = 4_096
"""Processes that ended, whose calls may still have to be accounted for."""
_OTHER: Final[What] = ("other", "", "", "", 0)
"""Of the row that counts calls for which there was no room by thread or by process."""


ONE_BY_ONE: Final = ("on_call_entry", "on_call_return")
"""Programs for kernels without links of many probes (uprobe_multi)."""


class DeviceCalls(Collector):
    """Counts calls of device APIs in all watched processes, exactly; stacks are sampled."""

    name = "device_calls"
    walks_stacks = True

    @staticmethod
    def bpf_object() -> BpfObject:
        """What is loaded into the kernel for it."""
        rows = by_cpus(ROWS)
        shares = {
            "free_rows": rows // FREE_DIVISOR,
            "most_rows_of_one_party": rows // PARTY_DIVISOR,
        }
        # Each program that is loaded takes 0.1 s.
        skip = ONE_BY_ONE if has_uprobe_multi() else ()
        return BpfObject("device_calls", shares, skip, {"device_calls": rows})

    def __init__(
        self,
        kernel: Kernel,
        apis: Iterable[Api],
        *,
        launches: bool,
        budget: float,
        pids: Collection[int] | None = None,
        files_budget: FileBudget | None = None,
        plain_files: PlainFiles | None = None,
    ) -> None:
        """`launches`: whether launches of kernels are probed, too; `budget`: the share of one core
        that calls of a probed function by one user or container may cost; `pids`: those that are
        watched; None for all; `files_budget`: CPU time that looking at the files of a user or
        container may take; `plain_files`: what is known of files before that."""
        self._bpf = kernel.load(self.bpf_object())
        self._iterators = Iterators(self._bpf)
        apis = tuple(apis)
        self._probes = Probes(self._bpf, apis, launches, budget, has_multi=has_uprobe_multi())
        self._duty = DutyCycle(self._probes, budget)
        self._ended_s: dict[int, float] = {}
        """When processes ended (monotonic), while probes are on in turns."""
        self._discovery = Discovery(apis, self._probes, pids, files_budget, plain_files)
        self._scan: int | None = None
        self._exit: int | None = None
        self._left_out = 0
        self.left_behind = []
        self._hits: dict[int, int] = {}
        self._was_hit = False
        """A site was ever hit."""
        self._charged_s = time.monotonic()
        expect_fields(self._bpf, "device_calls", FIELDS)

    def start(self) -> None:
        """Probe what is installed and what is mapped. Raises HostError where that is refused."""
        try:
            self._exit = self._bpf.attach("on_thread_exit")
            self._scan = self._bpf.attach("on_scan")
        except OSError as error:
            raise refusal(error) from error
        self._charged_s = time.monotonic()
        self._discovery.scan()

    def on_process_events(self, events: Sequence[ProcessEvent]) -> None:
        """Look at what processes map now, and note which of them have ended."""
        self._discovery.on_process_events(events)
        if self._duty:
            for event in events:
                is_end = isinstance(event, _native.ExitEvent) and event.pid == event.tid
                if is_end and len(self._ended_s) < MOST_ENDED:
                    self._ended_s[event.pid] = event.time_ns / 1e9

    def on_events_lost(self) -> None:
        """Look at what is mapped now instead."""
        self._discovery.resync()

    def on_processes_unseen(self, pids: Sequence[int]) -> None:
        """Look at what these map now."""
        self._discovery.look_at(pids)

    def ignorable_mappings(self) -> Mapping[tuple[FileKey, str], float]:
        """Files that carry no device API."""
        return self._discovery.irrelevant_files()

    @property
    def is_charged(self) -> bool:
        """Whether some process maps a file with probes on it."""
        return self._discovery.is_used

    @property
    def backlog(self) -> int:
        """Mapped files not looked at yet: `on_process_events` and `drain` go on with them."""
        return self._discovery.backlog

    def drain(self, since_ns: int, to_the_end: bool) -> Batch:
        """Totals of each thread by call, weighted stacks, single calls. `to_the_end`: with the time
        so far of calls that have not returned."""
        batch = Batch()
        self._duty.end_turn()
        hits = self._new_hits()
        if hits is not None:
            if to_the_end and self._scan is not None:
                self._iterators.run(self._scan)
            counted = self._add_rows(batch, since_ns, self._bpf.drain("device_calls"), to_the_end)
            self._add_spans(batch, since_ns)
            self._charge(hits)
            self._duty.charge(counted, hits)
        self._discovery.tidy()
        for notice in self._probes.notices:
            value = float(notice.value)
            row = EventRow(since_ns, "probe", notice.name, 0, 0, value, notice.text)
            batch.add("event", row)
        self._probes.notices.clear()
        return batch

    def stop(self) -> None:
        """Take all probes off; what was summed stays readable."""
        self.left_behind = self._probes.close()
        for link in (self._exit, self._scan):
            if link is not None:
                self._bpf.detach(link)
        self._exit = self._scan = None

    def pause(self) -> None:
        """Nothing: putting probes on and taking them off stops the processes that run there. Calls
        go on being counted, and `resume` forgets them."""

    def resume(self) -> None:
        """Forget the calls made meanwhile."""
        self.drain(0, to_the_end=True)

    def losses(self) -> Mapping[str, int]:
        """Losses so far by name."""
        found = self._discovery
        unread = {
            "processes_unread": found.unread.processes,
            "files_left_out": found.left_out,
            "libraries_refused": found.refused,
            "probes_put_off": found.put_off,
            "files_over_share": found.over_share,
        }
        return {**self._iterators.losses(), **{name: lost for name, lost in unread.items() if lost}}

    def memory_bytes(self) -> int:
        """Kernel memory held."""
        return self._bpf.map_bytes()

    def _add_rows(
        self, batch: Batch, since_ns: int, rows: list[_native.Row], to_the_end: bool
    ) -> dict[tuple[int, What, Who], list[int]]:
        """Add totals and weights, also of calls that were not counted. Returns what was counted:
        calls, ns, bytes, calls within them."""
        totals: dict[tuple[What, Who], list[int]] = {}
        counted: dict[tuple[int, What, Who], list[int]] = {}
        for row in rows:
            pid, tid, start, stack_id, index, status, number, flags, count, *more = row
            nested, ns, size, weight_count, weight_ns, weight_bytes, max_ns = more
            if flags & CALL_GOING_ON and not self._probes.is_on(index):
                continue  # its return is not seen any more: it would go on for ever
            start_ns = start - start % START_UNIT_NS
            who = (pid, start_ns, tid)
            batch.threads.add(who)
            batch.seen += count if status != STATUS_UNKNOWN else 0  # such calls give no span
            what: What = _OTHER
            times = of_stacks = 1.0
            if pid:
                call = self._probes.sites[index].call
                what = (call.function, call.api, call.op, call.direction_of(number), status)
                times, of_stacks = self._duty.factors(index)
                raw = counted.setdefault((index, what, who), [0, 0, 0, 0])
                for at, new in enumerate((count, ns, size, nested)):
                    raw[at] += new
            sums = [count, ns, size]
            if times != 1:
                sums = [round(number * times) for number in sums]
            _add(totals, (what, who), sums, max_ns)
            if weight_count:
                weights = (
                    weight_count * of_stacks,
                    weight_ns * of_stacks,
                    weight_bytes * of_stacks,
                )
                batch.add("sample", (since_ns, "device", what[0], *who, stack_id, *weights))
                batch.stacks[stack_id] = (pid, start_ns)
        if to_the_end:
            for what, who, unseen in self._duty.unseen(self._ended_s):
                batch.threads.add(who)
                _add(totals, (what, who), unseen, 0)
            self._ended_s.clear()
        for (what, who), total in totals.items():
            count, ns, size, max_ns = (min(number, _LARGEST) for number in total)
            numbers = (count, ns, size, max_ns, 0, 0)
            batch.add("activity", (since_ns, "device", *what, *who, *numbers))
        return counted

    def _add_spans(self, batch: Batch, since_ns: int) -> None:
        ring = self._bpf.drain_ring("call_spans", "call_span", SPANS_A_TICK)
        # A call can be in the rows of this interval and in the ring of the next, or the reverse.
        self._left_out += batch.seen - len(ring)
        if self._left_out > 0:
            left_out, self._left_out = self._left_out, 0
            text = "short calls beyond the first of each second are totals only"
            row = EventRow(since_ns, "notice", "spans_left_out", 0, 0, float(left_out), text)
            batch.add("event", row)
        if not len(ring):
            return
        calls = {index: site.call for index, site in self._probes.sites.items()}
        directions = [
            calls[index].direction_of(number)
            for index, number in zip(ring.column("site"), ring.column("direction"), strict=True)
        ]
        batch.add_who(ring)
        batch.spans.append(
            {
                "start_time_ns": ring.ints("start_time_ns"),
                "end_time_ns": ring.ints("end_time_ns"),
                "kind": ring.constant("device"),
                "name": ring.texts("site", {i: call.function for i, call in calls.items()}, ""),
                "op": ring.texts("site", {i: call.op for i, call in calls.items()}, ""),
                "direction": directions,
                "status": ring.ints("status"),
                "pid": ring.ints("tgid"),
                "start_ns": ring.ints("start_ns", START_UNIT_NS),
                "tid": ring.ints("tid"),
                "stack_id": ring.ints("stack_id"),
                "bytes": ring.ints("bytes"),
                "waker_pid": ring.zeros(),
                "waker_tid": ring.zeros(),
            }
        )

    def charge(self) -> None:
        """Hold what the probes cost against their budget: every hit, also of processes that are not
        watched and of calls that another call makes."""
        hits = self._new_hits()
        if hits is not None:
            self._charge(hits)

    def _charge(self, hits: Mapping[int, int]) -> None:
        before_s, self._charged_s = self._charged_s, time.monotonic()
        self._probes.charge(hits, self._charged_s - before_s)

    def _new_hits(self) -> dict[int, int] | None:
        """How often each site was hit since the last call; None as long as none ever was: then
        there is no call, finished or going on, to ask for."""
        numbers = list(self._probes.sites)
        now = dict(zip(numbers, self._bpf.sums("hits", numbers), strict=True))
        self._was_hit = self._was_hit or any(now.values())
        if not self._was_hit:
            self._charged_s = time.monotonic()
            return None
        new = {n: now[n] - self._hits.get(n, 0) for n in numbers}
        self._hits = now
        return new


def _add(
    totals: dict[tuple[What, Who], list[int]],
    to: tuple[What, Who],
    sums: Sequence[int],
    max_ns: int,
) -> None:
    """Add calls, ns and bytes to a total, whose fourth number is the longest call's ns."""
    total = totals.setdefault(to, [0, 0, 0, 0])
    for at, number in enumerate(sums):
        total[at] += number
    total[3] = max(total[3], max_ns)
