# SPDX-License-Identifier: Apache-2.0
"""Makes a `Moment` of the rows of a tick: summed by process, and bounded, so that those of the last
seconds can be kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence

from sonde.agent.device_moments import DeviceReader
from sonde.collect.collector import Batch
from sonde.diagnose.moments import (
    Call,
    CodePlace,
    DiskUse,
    FlowUse,
    Moment,
    Place,
    ProcessMoment,
    Role,
    Usage,
    Wait,
)
from sonde.model.code import KnownFrame
from sonde.model.libraries import CodeKind, kind_of_file, kind_of_native
from sonde.model.rows import ActivityRow, UsageRow

MAX_FRAMES = 64
"""Of a stack, from the leaf, that its role is read from."""
MAX_STACKS = 16_384
"""Stacks whose place is remembered."""
MAX_PLACES = 4_096
"""Places that have a number (`Window.places`); stacks of others count as place 0, unknown."""
MAX_UNNAMED = 4_096
"""Stacks without names whose time is summed up."""
MAX_WAITS = 256
"""Of a process in one moment: the longest are kept."""
MAX_PLACES_OF_PROCESS = 128
"""In one moment: those with most time are kept."""
MAX_CALLS = 64
"""Of a process in one moment, by thread and function: those with most time are kept."""
MAX_STARTS = 8_192
"""Processes whose start is remembered."""
MAX_PROCESSES = 1_024
"""Of one moment, those that did most; a process can start any number of threads and children."""
MIN_SHARE = 0.002
"""Of a CPU, in one moment: a process that used less, and read and wrote nothing, slowed nobody."""
LARGEST = (1 << 53) - 1
"""Limit of any number: up to it a float is exact, and no true count is larger."""
LATE_NS = 50_000_000
"""A wait may be read this much after its moment's end, so it may be longer than the moment."""
GARBAGE_FRAMES = frozenset(
    (
        *("gc_collect_main", "gc_collect_generations", "gc_collect_with_callback", "gc_collect"),
        *("_PyGC_Collect", "PyGC_Collect", "deduce_unreachable", "gc_collect_region"),
        *("gc_collect_increment", "gc_collect_full", "gc_collect_young", "GC_mark_from"),
        *("visit_decref", "visit_reachable", "update_refs", "move_unreachable", "subtract_refs"),
    )
)
"""Functions of CPython's garbage collector (Modules/gcmodule.c, Python/gc.c), and of Boehm's."""
LOCK_FRAMES = frozenset(
    (
        *("take_gil", "PyEval_RestoreThread", "PyEval_AcquireThread", "PyEval_AcquireLock"),
        *("PyGILState_Ensure", "_PyThreadState_Attach"),
    )
)
"""Functions of CPython in which a thread waits for the GIL."""


class MomentMaker:
    """Makes moments; remembers from tick to tick which place each stack is at."""

    def __init__(self, frames_of: Callable[[int], Sequence[KnownFrame]], period_ns: float) -> None:
        """`frames_of`: the frames of a stack by its id, leaf first; `period_ns`: CPU time between
        two on-CPU samples."""
        self._frames_of = frames_of
        self._period_ns = period_ns
        self.places: list[CodePlace] = [CodePlace(Role.UNKNOWN, "")]
        """By number."""
        self._numbers: dict[CodePlace, int] = {self.places[0]: 0}
        self._of_stack: dict[int, int] = {}
        """The number of the place of each stack, by stack id."""
        self.starts: dict[int, int] = {}
        """Start (ns since boot) of each process that recent rows have, by pid."""
        self.left_out = 0
        """Stacks whose place had no room in `places`, each time that one occurred."""
        self._devices = DeviceReader()
        self.rows_left_out = 0
        """Waits, places and device calls of processes for which their moments had no room."""
        self._unnamed: dict[int, float] = {}
        """By stack id: the time (ns) of stacks that have no names yet."""

    def make(
        self,
        since_ns: int,
        now_ns: int,
        batches: Iterable[Batch],
        chosen: Container[int] = (),
    ) -> Moment:
        """The moment from `since_ns` to `now_ns` (CLOCK_MONOTONIC). Of processes that are not
        `chosen`, it has only those that used something (`MIN_SHARE`)."""
        found: dict[int, ProcessMoment] = defaultdict(ProcessMoment)
        waits: dict[tuple[int, int, str, str], Wait] = {}
        places: dict[tuple[int, int, str, int], float] = defaultdict(float)
        calls: dict[tuple[int, int, str, str], Call] = {}
        starts = self.starts
        least_ns = int(MIN_SHARE * (now_ns - since_ns))
        longest_ns = now_ns - since_ns + LATE_NS  # no thread can have waited longer in it
        for batch in batches:
            self._take_activity(batch, found, waits, calls, longest_ns)
            self._devices.take(batch.metrics)
            self._take_samples(batch, places)
            for row in batch.rows.get("usage", ()):
                starts[row[1]] = row[2]
                # A plain tuple, not a UsageRow: most are of idle processes, and end here.
                if row[3] < least_ns and not any(row[10:15]) and row[1] not in chosen:
                    continue
                self._take_usage(UsageRow._make(row), found)
        for (pid, *_), wait in waits.items():
            found[pid].waits.append(wait)
        for (pid, tid, reason, place), ns in places.items():
            found[pid].places.append(Place(tid, reason, place, ns))
        for (pid, *_), call in calls.items():
            found[pid].calls.append(call)
        while len(starts) > MAX_STARTS:
            del starts[next(iter(starts))]
        devices, shares = self._devices.give()
        for pid, share in shares:
            found[pid].devices.append(share)
        moment = _bounded(since_ns, now_ns, found)
        moment.devices = devices
        self.rows_left_out += sum(one.left_out for one in moment.processes.values())
        return moment

    @staticmethod
    def _take_usage(row: UsageRow, found: dict[int, ProcessMoment]) -> None:
        used = (
            row.cpu_ns, row.runqueue_ns, row.voluntary, row.involuntary, row.migrations,
            row.major_faults, row.read_bytes, row.written_bytes, row.reclaim_ns,
        )  # fmt: skip
        found[row.pid].usage = Usage(*(min(it, LARGEST) for it in used))

    @staticmethod
    def _take_activity(
        batch: Batch,
        found: dict[int, ProcessMoment],
        waits: dict[tuple[int, int, str, str], Wait],
        calls: dict[tuple[int, int, str, str], Call],
        longest_ns: int,
    ) -> None:
        for row in batch.records(ActivityRow):
            if row.kind in ("blocked", "runqueue"):
                key = (row.pid, row.tid, row.name, row.op)
                wait = waits.get(key)
                if wait is None:
                    wait = waits[key] = Wait(row.tid, row.name, row.op)
                if row.kind == "blocked":
                    wait.blocked_ns = min(wait.blocked_ns + row.ns, longest_ns)
                    wait.count = min(wait.count + row.count, LARGEST)
                    wait.max_ns = min(max(wait.max_ns, row.max_ns), LARGEST)
                    if row.waker_pid or not wait.waker_pid:
                        wait.waker_pid, wait.waker_tid = row.waker_pid, row.waker_tid
                else:
                    wait.ready_ns = min(wait.ready_ns + row.ns, longest_ns)
                continue
            count, ns, size = (min(it, LARGEST) for it in (row.count, row.ns, row.bytes))
            if row.kind == "block":
                found[row.pid].disk.append(DiskUse(row.name, row.op, count, ns, 0, size))
            elif row.kind == "block-queue" and (disk := found[row.pid].disk):
                disk[-1].queue_ns = min(disk[-1].queue_ns + ns, LARGEST)
            elif row.kind == "device":
                what = (row.pid, row.tid, row.name, row.direction)
                call = calls.get(what)
                if call is None:
                    call = calls[what] = Call(row.name, 0, 0, row.op, row.direction, 0, row.tid)
                call.count = min(call.count + count, LARGEST)
                call.ns = min(call.ns + ns, LARGEST)
                call.bytes = min(call.bytes + size, LARGEST)
            elif row.kind == "tcp":
                longest = min(row.max_ns, LARGEST)
                found[row.pid].flows.append(FlowUse(row.name, row.op, count, size, longest))

    def _take_samples(self, batch: Batch, places: dict[tuple[int, int, str, int], float]) -> None:
        if batch.on_cpu is not None:
            names = ["tgid", "tid", "stack_id", "count"]
            for pid, tid, stack_id, count in batch.on_cpu.rows(names):
                ns = count * self._period_ns
                places[pid, tid, "", self._place(stack_id, ns)] += ns
        for sample in batch.rows.get("sample", ()):
            _, kind, name, pid, _, tid, stack_id, _, weight_ns, _ = sample
            if kind == "blocked" and weight_ns:
                places[pid, tid, name, self._place(stack_id, weight_ns)] += weight_ns

    def unnamed_ns(self, stack_id: int) -> float:
        """How much time a stack stands for so far that has no names yet; 0 for any other stack."""
        return self._unnamed.get(stack_id, 0.0)

    def _place(self, stack_id: int, ns: float) -> int:
        """The number of a stack's place; 0 where it has no names yet, or no room. `ns`: time that
        it stands for now."""
        known = self._of_stack.get(stack_id)
        if known is not None:
            return known
        frames = self._frames_of(stack_id) if stack_id else ()
        if not frames:
            if stack_id:
                self._unnamed[stack_id] = self._unnamed.pop(stack_id, 0.0) + ns
            while len(self._unnamed) > MAX_UNNAMED:
                del self._unnamed[next(iter(self._unnamed))]
            return 0
        self._unnamed.pop(stack_id, None)
        place = place_of(frames)
        number = self._numbers.get(place)
        if number is None:
            if len(self.places) >= MAX_PLACES:
                self.left_out += 1
                return 0
            number = self._numbers[place] = len(self.places)
            self.places.append(place)
        while len(self._of_stack) >= MAX_STACKS:
            del self._of_stack[next(iter(self._of_stack))]
        self._of_stack[stack_id] = number
        return number


def place_of(frames: Sequence[KnownFrame]) -> CodePlace:
    """What a stack (leaf first) does, and the innermost frame that is the program's own code, else
    the innermost library."""
    role, text, library = Role.UNKNOWN, "", ""
    for _, frame in frames[:MAX_FRAMES]:
        if frame.kind == "python":
            kind = kind_of_file(frame.file, frame.function, frame.origin)
            if kind == CodeKind.OWN_PYTHON:
                text = f"{frame.function} {frame.file}:{frame.line}"
                break
            if kind == CodeKind.LOADER:
                role = max(role, Role.LOADER)
        elif frame.kind in ("user", "inlined"):
            if frame.function in GARBAGE_FRAMES:
                role = Role.GARBAGE
            elif frame.function in LOCK_FRAMES:
                role = Role.INTERPRETER_LOCK
            kind = kind_of_native(frame.binary, frame.function, frame.origin)
            if kind == CodeKind.OWN_NATIVE and not text and frame.function:
                text = f"{frame.function} {frame.binary}"
        else:
            continue
        if role <= Role.CODE and kind == CodeKind.QUEUE:
            role = Role.QUEUE
        library = library or (frame.file or frame.binary)
    if role == Role.UNKNOWN and (text or library):
        role = Role.CODE
    return CodePlace(role, text or library)


def _time_ns(one: ProcessMoment) -> int:
    """Time of its threads on a CPU, ready and waiting."""
    return one.usage.cpu_ns + one.usage.ready_ns + sum(it.blocked_ns for it in one.waits)


def _bounded(since_ns: int, now_ns: int, found: dict[int, ProcessMoment]) -> Moment:
    """The moment, cut to what was most."""
    for one in found.values():
        waits, places = len(one.waits) - MAX_WAITS, len(one.places) - MAX_PLACES_OF_PROCESS
        calls = len(one.calls) - MAX_CALLS
        one.left_out = max(0, waits) + max(0, places) + max(0, calls)
        if calls > 0:
            one.calls.sort(key=lambda it: (-it.ns, -it.count))
            del one.calls[MAX_CALLS:]
        if waits > 0:
            one.waits.sort(key=lambda it: -it.blocked_ns - it.ready_ns)
            del one.waits[MAX_WAITS:]
        if places > 0:
            one.places.sort(key=lambda it: -it.ns)
            del one.places[MAX_PLACES_OF_PROCESS:]
    left_out = max(0, len(found) - MAX_PROCESSES)
    if left_out:
        busiest = sorted(found, key=lambda pid: -_time_ns(found[pid]))[:MAX_PROCESSES]
        found = {pid: found[pid] for pid in busiest}
    found.pop(0, None)
    return Moment(since_ns, now_ns, dict(found), left_out)
