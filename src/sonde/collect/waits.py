# SPDX-License-Identifier: Apache-2.0
"""Off-CPU: how long threads were blocked and on what, and how long they then waited for a CPU."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

from sonde import _native, procfs
from sonde.collect.collector import Batch, Collector
from sonde.collect.kernel import (
    BpfObject,
    Iterators,
    Kernel,
    by_cpus,
    expect_fields,
    losses_of,
    refusal,
)
from sonde.collect.peers import PeerLooks
from sonde.collect.reasons import reason_names, reason_of
from sonde.collect.small_waits import RestKey, SmallWaits
from sonde.model.rows import ActivityTuple, SampleTuple
from sonde.procfs import START_UNIT_NS

FIELDS = (
    *("tgid", "tid", "start_ns", "stack_id", "reason"),
    *("count", "blocked_ns", "runqueue_ns"),
    *("weight_count", "weight_blocked_ns", "weight_runqueue_ns"),
    *("max_blocked_ns", "max_runqueue_ns", "waker_tgid", "waker_tid"),
)
SPANS_A_TICK = 20_000
"""Single waits that are drained at a time."""
SPAN_PART: Final = 10
"""Of a single wait that was almost all blocked, or almost all in the run queue, the other part
below one in SPAN_PART of what single waits last at least has no row where rows are few."""
WALK_STEPS = 128
"""Frames that a walk may unwind, fewer than elsewhere: it holds the run-queue lock."""
SWITCHES = ("on_waking", "on_new", "on_switch")
"""Programs that run at every switch or wake-up."""


LONG_WAIT_NS: Final = 1_000_000
"""Waits of this length or more are counted one by one, however many there are; of shorter ones some
stand for all (bpf/short_waits.h)."""
LONGEST_SHORT_WAIT_NS: Final = 4_000_000
"""What LONG_WAIT_NS is raised to at most, on a CPU with very many waits: there more of them are
short ones."""
OTHER: Final = ("other", "")
"""Reason and call of what was counted for all processes together."""
_ALL_ROWS: Final = SmallWaits(0)
ROWS: Final = 16_384
MAX_ROWS: Final = 32_768
"""Bounds of the map `waits`; more rows would take longer to read than a tick has."""
ROWS_A_THREAD: Final = 2
ROWS_A_PROCESS: Final = 4
"""What a thread needs of `waits`, and a process of `waits_spare`, between two drains."""
LEAST_SPARE: Final = 2_048
MAX_SPARE: Final = 16_384
"""Bounds of the map `waits_spare`: rows by process, for what finds no room in `waits`."""


def _threads() -> int:
    """How many threads the machine has; 0 where it does not report it."""
    running, _, total = (procfs.read_file("/proc/loadavg") or b"").partition(b"/")
    return int(total.split()[0]) if running and total else 0


def _room() -> dict[str, int]:
    """Entries of the maps of rows, by what runs on this machine now.

    Where they do not suffice, rows get coarser: by process, and in the end one for all.
    """
    rows = min(max(ROWS_A_THREAD * _threads(), ROWS), MAX_ROWS)
    spare = min(max(ROWS_A_PROCESS * len(procfs.pids()), LEAST_SPARE), MAX_SPARE)
    return {"waits": by_cpus(rows), "waits_spare": spare}


class WaitCollector(Collector):
    """Splits the time off the CPU at the wake-up: blocked before it, in the run queue after."""

    name = "waits"
    walks_stacks = True
    limits_stacks = True
    reports_ongoing = True

    @staticmethod
    def bpf_object(*, span_min_ns: int, stack_gap_ns: int) -> BpfObject:
        """What is loaded into the kernel for it."""
        arguments = _native.tracepoint_arguments("sched_switch")
        constants = {
            "switch_has_state": int((arguments or 0) >= 4),
            "span_min_ns": span_min_ns,
            "stack_gap_ns": stack_gap_ns,
            "unwind_steps": WALK_STEPS,
            "long_wait_ns": min(LONG_WAIT_NS, span_min_ns),
            "longest_short_wait_ns": min(LONGEST_SHORT_WAIT_NS, span_min_ns),
        }
        return BpfObject("waits", constants, max_entries=_room())

    def __init__(
        self, kernel: Kernel, *, span_min_ns: int, stack_gap_ns: int, least_ns: int = 0
    ) -> None:
        """Waits of `span_min_ns` or more are kept one by one. `least_ns`: what a row of others
        stands for at least (`small_waits`); 0: any time."""
        wanted = self.bpf_object(span_min_ns=span_min_ns, stack_gap_ns=stack_gap_ns)
        self._bpf = kernel.load(wanted)
        self._iterators = Iterators(self._bpf)
        self._small = SmallWaits(least_ns)
        self._peers = PeerLooks()
        self._span_part_ns = span_min_ns // SPAN_PART if least_ns else 0
        self._links: list[int] = []
        self._switches: list[int] = []
        """Links of SWITCHES."""
        self._scan: int | None = None
        """The iterator that takes in threads that wait, and adds what waits have lasted so far."""
        self._missed = 0
        """Threads that had no state, as counted at the last look (`_misses_threads`)."""
        self._forget: int | None = None
        """The iterator that ends all waits that go on."""
        self._reasons = reason_names()
        expect_fields(self._bpf, "waits", FIELDS)

    def start(self) -> None:
        """Take in the threads that wait already, then follow every switch. Raises HostError."""
        try:
            # Make state for threads as they are forked, then for those that exist. `resume` follows
            # all of them, and takes in those that went to sleep meanwhile.
            self._links = [self._bpf.attach("on_born")]
            self._scan = self._bpf.attach("on_scan")
            self._forget = self._bpf.attach("on_forget")
            self._bpf.walk(self._scan)
        except OSError as error:
            raise refusal(error) from error
        self.resume()

    def resume(self) -> None:
        """Follow every switch, and take in the threads that wait already. Raises HostError."""
        assert self._scan is not None
        try:
            self._switches = [self._bpf.attach(program) for program in SWITCHES]
            self._bpf.walk(self._scan)
        except OSError as error:
            raise refusal(error) from error

    def pause(self) -> None:
        """Detach from the scheduler.

        A wait that goes on meanwhile counts up to here, and again from `resume` on.
        """
        assert self._scan is not None and self._forget is not None
        self._detach_switches()
        self._iterators.run(self._scan)
        self._iterators.run(self._forget)

    def drain(self, since_ns: int, to_the_end: bool) -> Batch:
        """Totals of each thread by reason, weighted stacks, and the long waits one by one."""
        batch = self._counted(since_ns, to_the_end)
        if activity := batch.rows.get("activity"):
            activity += self._peers.rows(since_ns, activity)
        return batch

    def count_from_now(self, since_ns: int) -> Batch:
        """What was counted so far, without looks at peers, which take a while."""
        return self._counted(since_ns, to_the_end=True)

    def _counted(self, since_ns: int, to_the_end: bool) -> Batch:
        if self._scan is not None and self._switches and (to_the_end or self._misses_threads()):
            self._iterators.run(self._scan)
        batch = Batch()
        self._add_rows(batch, since_ns, self._bpf.drain("waits"), self._small)
        self._add_rests(batch, since_ns, self._small, to_the_end)
        self._add_spans(batch)
        if to_the_end:
            estimated = sum(row[0] for row in self._bpf.values("wait_pressure", 0, per_cpu=True))
            batch.metrics.append((since_ns, "sonde.waits.estimated", "", float(estimated)))
        return batch

    def set_stack_divisor(self, divisor: int) -> None:
        """Take one stack in `divisor` of those that would be taken; each counts `divisor` times."""
        self._bpf.set_array("stack_divisor", 0, struct.pack("=I", divisor))

    def _misses_threads(self) -> bool:
        """Whether there are new threads without state, for which there was no memory when they were
        forked: a scan makes it."""
        missed = losses_of(self._bpf).get("task_storage", 0)
        self._missed, new = missed, missed > self._missed
        return new

    @staticmethod
    def _add_rows(
        batch: Batch, since_ns: int, rows: list[_native.Row], small: SmallWaits = _ALL_ROWS
    ) -> None:
        activity: list[ActivityTuple] = []
        sample: list[SampleTuple] = []
        for pid, tid, start, stack_id, nr, count, blocked_ns, runqueue_ns, *more in rows:
            weight_count, weight_blocked, weight_runqueue, max_blocked, max_runqueue, *waker = more
            waker_pid, waker_tid = waker
            start_ns = start - start % START_UNIT_NS
            name, call = reason_of(nr) if pid else OTHER
            who = (pid, start_ns, tid)
            batch.threads.add(who)
            batch.seen += count
            for kind, ns, weight_ns, max_ns in (
                ("blocked", blocked_ns, weight_blocked, max_blocked),
                ("runqueue", runqueue_ns, weight_runqueue, max_runqueue),
            ):
                if not ns:
                    continue
                has_stack = bool(weight_count or weight_ns)  # or it found no room (id 0)
                factor = small.factor(kind, weight_ns) if has_stack else 0.0
                if not factor and small.least_ns:
                    key = RestKey(kind, name, call, *who)
                    small.add(key, count, ns, max_ns, (waker_pid, waker_tid))
                    continue
                # The waker of the run-queue time, too: it made the thread ready. (Of spans the
                # blocked one has it, which the run-queue one follows; sums follow nothing.)
                activity.append((
                    since_ns, kind, name, "", call, "", 0, pid, start_ns, tid,
                    count, ns, 0, max_ns, waker_pid, waker_tid,
                ))  # fmt: skip
                if has_stack:
                    weights = (weight_count * factor, weight_ns * factor, 0.0)
                    sample.append((since_ns, kind, name, *who, stack_id, *weights))
                    if stack_id:
                        batch.stacks[stack_id] = (pid, start_ns)
        if activity:
            batch.rows["activity"] = activity
        if sample:
            batch.rows["sample"] = sample

    @staticmethod
    def _add_rests(batch: Batch, since_ns: int, small: SmallWaits, to_the_end: bool) -> None:
        """Rows of what was added up of small waits (`small_waits`)."""
        for key, rest in small.due(to_the_end):
            kind, name, call, pid, start_ns, tid = key
            batch.threads.add((pid, start_ns, tid))
            batch.add("activity", (
                since_ns, kind, name, "", call, "", 0, pid, start_ns, tid,
                rest.count, rest.ns, 0, rest.max_ns, *rest.waker,
            ))  # fmt: skip

    def _add_spans(self, batch: Batch) -> None:
        ring = self._bpf.drain_ring("wait_spans", "wait_span", SPANS_A_TICK)
        if not len(ring):
            return
        batch.add_who(ring)
        for kind, start, end in (
            ("blocked", "start_time_ns", "wake_time_ns"),
            ("runqueue", "wake_time_ns", "end_time_ns"),
        ):
            part = ring.where_less(start, end, self._span_part_ns)
            batch.spans.append(
                {
                    "start_time_ns": part.ints(start),
                    "end_time_ns": part.ints(end),
                    "kind": part.constant(kind),
                    "name": part.texts("reason", self._reasons.names, "system call"),
                    "op": part.texts("reason", self._reasons.calls, ""),
                    "direction": part.constant(""),
                    "status": part.zeros(),
                    "pid": part.ints("tgid"),
                    "start_ns": part.ints("start_ns", START_UNIT_NS),
                    "tid": part.ints("tid"),
                    "stack_id": part.ints("stack_id"),
                    "bytes": part.zeros(),
                    "waker_pid": part.ints("waker_tgid") if kind == "blocked" else part.zeros(),
                    "waker_tid": part.ints("waker_tid") if kind == "blocked" else part.zeros(),
                }
            )

    def stop(self) -> None:
        """Detach from the scheduler; what was summed stays readable."""
        self._detach_switches()
        for link in self._links:
            self._bpf.detach(link)
        self._links = []

    def _detach_switches(self) -> None:
        for link in self._switches:
            self._bpf.detach(link)
        self._switches = []

    def losses(self) -> Mapping[str, int]:
        """Losses so far by name."""
        found = dict(self._iterators.losses())
        if self._peers.cut:
            found["peers_cut"] = self._peers.cut
        return found

    def memory_bytes(self) -> int:
        """Kernel memory held."""
        return self._bpf.map_bytes()
