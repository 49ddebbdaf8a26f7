# SPDX-License-Identifier: Apache-2.0
"""What devices did, and for how long, of every process that carries our library.

A process carries it because somebody attached it or started it with it; here it is found, sent
heartbeats, and asked to time about N launches a second. Of each block of launches one is
chosen, so a run stands for `weight` like it. What was chosen and could not be timed is a loss, and
its weight is added to that of the next run of its kind: sums of weights stay true.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from sonde import procfs
from sonde._native import ForkEvent, MmapEvent, ProcessEvent
from sonde.collect import inject_abi as abi
from sonde.collect.carriers import may_carry, same_tids
from sonde.collect.collector import Batch, Collector, ProcessKey
from sonde.collect.device_process import DeviceProcess, Finder
from sonde.collect.device_rows import name_of, row_of
from sonde.collect.inject_memory import LIBRARY, InjectMemory, Seen
from sonde.collect.inject_records import Ring, Run
from sonde.collect.launch_sites import LaunchSites
from sonde.collect.overhead_controller import OverheadController
from sonde.collect.ring_budget import MOST_SPARE_S, Turn, shares
from sonde.collect.slots import Slots, slots_asked
from sonde.collect.slowdown import estimate
from sonde.metrics import labels
from sonde.model.rows import EventRow

LOOK_AGAIN_S: Final = 10.0
"""How often processes that had no library are looked at again."""
LOOK_WITH_EVENTS_S: Final = 300.0
"""The same where process events report a library as soon as it is mapped."""
YOUNG_S: Final = 10.0
"""Processes younger than this are looked at in every tick, where there are no events."""
SOON_S: Final = 1.0
SILENT_NS: Final = 1_500_000_000
"""A library that is silent for so long may have gone with the program that was executed over."""
STACKS_HELD: Final = 16_384
"""Stacks of launches whose runs have not come yet, a process."""
MOST_RINGS: Final = 256
MOST_NOTICES: Final = 256
LEFT_S: Final = 1.0
"""What a program left behind over which another was executed is read as in a turn of so long."""
REPORT_S: Final = 10.0
"""How often the cost of timing is reported."""

_LOST: Final = ("lost_ring", "lost_pool", "lost_order")
"""Counts of launches that were chosen and not timed."""


class DeviceTime(Collector):
    """Collects device runs through the library in each process (abi/inject.h)."""

    name = "device_time"
    needs_events_first = True

    def __init__(
        self,
        pids: Iterable[int] | None,
        budget: float,
        sites: LaunchSites | None = None,
        *,
        has_events: bool = False,
    ) -> None:
        """`sites`: takes stacks in the kernel; without, the library follows frame pointers.

        `has_events`: process events report each library as soon as it is mapped, so that there is
        seldom need to scan processes for it.
        """
        self._sites = sites
        self._pids = None if pids is None else frozenset(pids)
        self._budget = budget
        self._processes: dict[int, DeviceProcess] = {}
        self._looked: dict[int, tuple[int, float]] = {}
        """By pid: start, and when (monotonic s) it was looked at last."""
        self._left: list[DeviceProcess] = []
        """What programs left behind over which others were executed."""
        self._has_events = has_events
        self._look_s = 0.0
        """When to look all the same."""
        self._report_s = 0.0
        """When to report the cost of timing."""
        self._losses: dict[str, int] = {}
        self._turn_ns = time.monotonic_ns()
        """When rings were read last."""
        self._known_stacks: OrderedDict[int, None] = OrderedDict()
        self._spare_s = MOST_SPARE_S
        """Of the time of turns before, not needed there."""
        self._finder = Finder()
        self._slots = Slots()
        self._withheld: dict[int, tuple[ProcessKey, bool]] = {}
        """By pid: processes that carry the library and are not ours to read; True: another agent
        reads them, False: somebody wants them left alone. No event comes when that ends."""
        self._ask_again_s = 0.0
        self._notices: list[EventRow] = []
        self._paused = False
        self.left_behind = []
        self._stopped = threading.Event()
        self._carried = threading.Event()
        """Set while some process carries the library, and at the end."""
        self._closing = threading.Lock()
        """Held while descriptors are used or closed: a number may soon be another file."""
        self._heart = threading.Thread(
            target=self._send_heartbeats, name="sonde-heartbeat", daemon=True
        )

    @property
    def pids(self) -> Collection[int]:
        """Processes whose library is read."""
        return self._processes.keys()

    @property
    def is_active(self) -> bool:
        """Whether some process carries the library, or has just mapped it."""
        return bool(self._processes or self._finder.is_waiting or self._left)

    def start(self) -> None:
        """Find the processes that carry the library already."""
        self._look(time.monotonic())
        self._heart.start()

    def _send_heartbeats(self) -> None:
        """Send heartbeats to every library; by a separate thread, as reading may take long.

        It goes on in a pause, when nothing is asked for.
        """
        while not self._stopped.wait(abi.HEARTBEAT_NS / 1e9):
            if not self._processes:
                self._carried.clear()
                # Still, after that: none came in between, and nobody ends us.
                if not self._processes and not self._stopped.is_set():
                    self._carried.wait()
            with self._closing:
                for process in list(self._processes.values()):
                    with suppress(OSError):
                        process.memory.heartbeat()

    def on_process_events(self, events: Sequence[ProcessEvent]) -> None:
        """Open what has just taken the library in, so that a short process is seen, too."""
        if self._paused:
            return
        now_s = time.monotonic()
        mapping: set[int] = set()
        for event in events:
            pid = event.pid
            if isinstance(event, MmapEvent):
                if LIBRARY.search(event.path) and pid not in mapping:
                    mapping.add(pid)
                    party = self._finder.party_of(pid)
                    self._finder.expect(pid, now_s + SOON_S, party)
                    if self._finder.is_free(party):  # else its silence shows
                        self._leave_if_replaced(pid)
            elif (
                isinstance(event, ForkEvent)
                and pid != event.parent_pid
                and event.parent_pid in self._processes
            ):
                parent = self._processes[event.parent_pid]
                self._finder.expect(pid, now_s + YOUNG_S, parent.party)
        for pid, until_s in self._finder.awaited():
            if pid not in self._processes and self._is_wanted(pid):
                with suppress(OSError):
                    self._open(pid)
            if pid in self._processes or now_s > until_s:
                self._finder.forget(pid)
        if not self._has_events:
            self._look(now_s)

    def on_events_lost(self) -> None:
        """Look at processes at the next tick."""
        self._look_s = 0.0

    def drain(self, since_ns: int, to_the_end: bool) -> Batch:
        """Runs since the last call."""
        batch = Batch()
        now_ns = time.monotonic_ns()
        looks = not self._has_events or now_ns / 1e9 > self._look_s
        for notice in self._notices:
            batch.add("event", notice)
            batch.threads.add((notice.pid, notice.start_ns, notice.pid))
        self._notices.clear()
        if not self._paused:
            self._ask_again(now_ns / 1e9)
            self._take_stacks_in_the_kernel()
        if not self._processes and not self._left and not looks:
            return batch
        alive = set(procfs.pids())  # asked first: what a process leaves behind is still read
        seen = self._seen()
        self._take_stacks(batch)  # a launch's stack is taken before it is timed
        self._drain_all(seen, since_ns, now_ns, batch)
        for pid, one in seen.items():
            if now_ns - one.counts["polled_ns"] > SILENT_NS:
                self._leave_if_replaced(pid)
        self._add_slowdown(now_ns, batch)
        self._drain_left(since_ns, now_ns, batch)
        for pid in self._processes.keys() - alive:
            self._drop(pid)
        for pid in self._looked.keys() - alive:
            del self._looked[pid]
        if not self._paused and looks:
            self._look(now_ns / 1e9)
            self._look_s = now_ns / 1e9 + (LOOK_WITH_EVENTS_S if self._has_events else LOOK_AGAIN_S)
        return batch

    def wants_mapping(self, path: str) -> bool:
        """Whether it is our library."""
        return LIBRARY.search(path) is not None

    def stop(self) -> None:
        """Let go: the libraries go idle."""
        self._stopped.set()
        self._carried.set()
        if self._heart.is_alive():
            self._heart.join()
        for process in self._processes.values():
            with suppress(OSError):
                process.memory.want(0)
        if self._sites:
            self.left_behind = self._sites.close()
        for pid in list(self._processes):
            self._drop(pid)
        self._slots.close()

    def pause(self) -> None:
        """The libraries do nothing but wait."""
        self._paused = True
        for process in self._processes.values():
            with suppress(OSError):
                process.memory.want(0)

    def resume(self) -> None:
        """As asked for before."""
        self._paused = False
        for process in self._processes.values():
            with suppress(OSError):
                process.memory.want(process.request)
                process.memory.heartbeat()
        self._look(time.monotonic())

    def losses(self) -> Mapping[str, int]:
        """What was lost so far, by name."""
        counted = dict(self._losses, slots_unread=self._slots.failed)
        counted["processes_unread"] = self._finder.unread.processes
        losses = {name: count for name, count in counted.items() if count}
        return losses | dict(self._sites.losses() if self._sites else {})

    def memory_bytes(self) -> int:
        """Kernel memory held."""
        return self._sites.memory_bytes() if self._sites else 0

    # ---- one process -------------------------------------------------------------------------

    def _seen(self) -> dict[int, Seen]:
        """The state of every library now, by pid."""
        seen = {}
        for pid, process in list(self._processes.items()):
            try:
                seen[pid] = process.memory.seen()
            except OSError:
                self._drop(pid)
        return seen

    def _take_stacks(self, batch: Batch) -> None:
        """Stacks that the kernel took since the last call, kept until their runs come."""
        for key, correlation, stack_id in self._sites.drain() if self._sites else ():
            process = self._processes.get(key[0])
            if process is None or process.key != key or not stack_id:
                continue
            batch.launch_stacks[stack_id] = key
            process.taken[correlation] = stack_id
            if len(process.taken) > STACKS_HELD:
                process.taken.popitem(last=False)

    def _drain_all(
        self, seen: Mapping[int, Seen], since_ns: int, now_ns: int, batch: Batch
    ) -> None:
        """Read every ring as far as its part of the budget goes, those that want little first."""
        elapsed_s = (now_ns - self._turn_ns) / 1e9
        self._turn_ns = now_ns
        turn = Turn.of(elapsed_s + self._spare_s)
        wanted = {
            pid: min(process.ring.waiting(seen[pid].counts["head"]), process.allowed(elapsed_s))
            for pid in seen
            if (process := self._processes[pid])
        }
        parties = {pid: self._processes[pid].party for pid in seen}
        parts = shares(wanted, parties, turn.records)
        began_s = time.thread_time()
        for pid in sorted(parts, key=lambda it: (parts[it], random.random())):
            process, most = self._processes[pid], parts[pid]
            if time.thread_time() > began_s + turn.cpu_s:
                most = 0
            try:
                self._drain(process, seen[pid], since_ns, now_ns, batch, most, turn)
            except OSError:
                self._drop(pid)
        turn.cpu_s -= time.thread_time() - began_s
        self._spare_s = turn.spare_s

    def _drain(
        self,
        process: DeviceProcess,
        seen: Seen,
        since_ns: int,
        now_ns: int,
        batch: Batch,
        most: int,
        turn: Turn,
    ) -> None:
        before = process.ring.tail
        names, stacks = turn.names_left_out, turn.stacks_left_out
        process.head = seen.counts["head"]
        taken = process.ring.take(process.head, now_ns, most, turn)
        read = max(0, process.ring.tail - before - taken.skipped)
        process.allowance.records -= read
        turn.records -= read
        process.memory.ask(tail=process.ring.tail)
        self._count("records_wrong", taken.wrong)
        self._lose(process, "records_overwritten", taken.skipped, now_ns)
        self._lose(process, "names_left_out", turn.names_left_out - names, now_ns)
        if process.overhead_controller.look(now_ns / 1e9, seen.counts, process.before):
            process.memory.ask(per_second=process.overhead_controller.per_second)
        self._count_lost(process, seen.counts, now_ns)
        if seen.reason != process.reported_reason:
            process.reported_reason = seen.reason
            if seen.reason != abi.Reason.OK:
                self._report(batch, process, "device_time_refused", seen.why)
        armed_ns = seen.counts["armed_ns"]
        if process.armed_ns < armed_ns <= now_ns:
            process.armed_ns = armed_ns
            batch.add("event", EventRow(armed_ns, "timing", "began", *process.key, 1.0, ""))
        weights: dict[tuple[str, int, int], list[float]] = {}
        for run in taken.runs:
            self._add_run(process, run, batch, weights, turn)
        self._lose(process, "stacks_left_out", turn.stacks_left_out - stacks, now_ns)
        pid, start_ns = process.key
        for (name, tid, stack_id), (count, ns, moved) in weights.items():
            batch.add(
                "sample",
                (since_ns, "kernel", name, pid, start_ns, tid, stack_id, count, ns, moved),
            )
        batch.seen += len(taken.runs)

    def _lose(self, process: DeviceProcess, name: str, count: int, now_ns: int) -> None:
        """Count a loss, and note now and then of which process it is."""
        self._count(name, count)
        if not count:
            return
        process.lost += count
        if (
            now_ns >= process.lost_reported_ns + int(REPORT_S * 1e9)
            and len(self._notices) < MOST_NOTICES
        ):
            process.lost_reported_ns = now_ns
            lost, process.lost = process.lost, 0
            text = "records of its device time, names or stacks beyond what is read in a turn"
            name = "device_time_lost"
            row = EventRow(now_ns, "notice", name, *process.key, float(lost), text)
            self._notices.append(row)

    def _add_run(
        self,
        process: DeviceProcess,
        run: Run,
        batch: Batch,
        weights: dict[tuple[str, int, int], list[float]],
        turn: Turn,
    ) -> None:
        pid, start_ns = process.key
        stack_id = process.taken.pop(run.correlation, 0)
        if stack_id:
            batch.launch_stacks[stack_id] = process.key
        else:
            stack_id = self._stack(process.key, run.stack, batch, turn)
        tid = run.tid if process.own_tids else pid
        name, weight = name_of(run), run.weight
        batch.threads.add((pid, start_ns, tid))
        stream = process.stream(run.stream)
        batch.add("device_run", row_of(run, process.key, tid, stack_id, stream))
        if run.type == abi.Type.SYNC:
            return  # time of the host, not of a device
        sums = weights.setdefault((name, tid, stack_id), [0.0, 0.0, 0.0])
        sums[0] += weight
        sums[1] += weight * (run.end_ns - run.start_ns)
        sums[2] += weight * run.bytes

    def _stack(self, key: ProcessKey, addresses: tuple[int, ...], batch: Batch, turn: Turn) -> int:
        if not addresses:
            return 0
        packed = b"".join(word.to_bytes(8, "little") for word in (*key, *addresses))
        stack_id = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") or 1
        if stack_id in self._known_stacks:
            self._known_stacks.move_to_end(stack_id)
        elif turn.stacks <= 0:
            turn.stacks_left_out += 1
            return 0
        else:
            turn.stacks -= 1
            self._known_stacks[stack_id] = None
            if len(self._known_stacks) > STACKS_HELD:
                self._known_stacks.popitem(last=False)
        batch.own_stacks[stack_id] = (key, addresses)
        return stack_id

    def _count_lost(self, process: DeviceProcess, counts: dict[str, int], now_ns: int) -> None:
        before, process.before = process.before, counts
        for name in (*_LOST, "lost_names", "yielded_ms", "looks_cut"):
            count = max(0, min(counts[name] - before[name], 1 << 40))
            if name == "lost_ring":
                self._lose(process, name, count, now_ns)
            else:
                self._count(name, count)

    def _add_slowdown(self, now_ns: int, batch: Batch) -> None:
        """Metrics: how much slower programs are for it, by the trials of all of them."""
        if now_ns < self._report_s * 1e9:
            return
        self._report_s = now_ns / 1e9 + REPORT_S
        found = (process.overhead_controller.trials.found for process in self._processes.values())
        now = estimate(itertools.chain.from_iterable(found))
        if now is None:
            return
        for bound, value in (("median", now.value), ("low", now.low), ("high", now.high)):
            batch.metrics.append(
                (now_ns, "sonde.device_time.slowdown", labels(sonde__bound=bound), value)
            )

    def _count(self, name: str, number: int) -> None:
        if number:
            self._losses[name] = self._losses.get(name, 0) + number

    @staticmethod
    def _report(batch: Batch, process: DeviceProcess, name: str, text: str) -> None:
        pid, start_ns = process.key
        now_ns = time.monotonic_ns()
        batch.add("event", EventRow(now_ns, "notice", name, pid, start_ns, 1.0, text))
        batch.threads.add((pid, start_ns, pid))

    def _leave_if_replaced(self, pid: int) -> None:
        """Let go of a process in which another program runs now; that may have a library, too."""
        process = self._processes.get(pid)
        if process is None:
            return
        with suppress(OSError):
            found = self._finder.find(pid, process.party)
            if found is not None:
                with found:
                    if os.path.sameopenfile(found.fd, process.memory.fd):
                        return
            self._slots.drop(pid)
            self._left.append(self._processes.pop(pid))
            self._looked.pop(pid, None)
            if self._sites:
                self._sites.drop(pid)

    def _drain_left(self, since_ns: int, now_ns: int, batch: Batch) -> None:
        left, self._left = self._left, []
        for process in left:
            with suppress(OSError):
                turn = Turn.of(LEFT_S)
                most = process.allowed(LEFT_S)
                self._drain(process, process.memory.seen(), since_ns, now_ns, batch, most, turn)
            self._count("records_unread", process.ring.waiting(process.head))
            with self._closing:
                process.memory.close()

    def _drop(self, pid: int) -> None:
        self._slots.drop(pid)
        with self._closing:
            process = self._processes.pop(pid, None)
            if process:
                self._count("records_unread", process.ring.waiting(process.head))
                process.memory.close()
                if self._sites:
                    self._sites.drop(pid)

    # ---- finding them ------------------------------------------------------------------------

    def _look(self, now_s: float) -> None:
        """Open the memory of processes that have one and are not ours yet."""
        for pid in procfs.pids():
            if pid not in self._processes and self._is_due(pid, now_s) and may_carry(pid):
                with suppress(OSError):
                    self._open(pid)

    def _is_due(self, pid: int, now_s: float) -> bool:
        known = self._looked.get(pid)
        if known is not None:
            start_ns, looked_s = known
            young = now_s - start_ns / 1e9 < YOUNG_S
            if not young and now_s - looked_s < LOOK_AGAIN_S:
                return False
        stat = procfs.read_stat(pid)
        if stat is None:
            return False
        self._looked[pid] = (stat.start_ns, now_s)
        return self._is_wanted(pid)

    def _is_wanted(self, pid: int) -> bool:
        """Is it, or was it begun by, one of the processes asked for?"""
        return self._pids is None or procfs.descends(pid, self._pids)

    def _open(self, pid: int) -> None:
        party = procfs.party_of(pid)
        memory = self._finder.find(pid, party)
        stat = procfs.read_stat(pid)
        before = self._withheld.pop(pid, None)
        if memory is None or stat is None:
            if memory is not None:
                memory.close()
            return
        key = (pid, stat.start_ns)
        is_detached = memory.is_detached()
        if is_detached or not memory.lock():
            memory.close()
            self._withhold(key, before, to_other=not is_detached)
            return
        if not self._has_place(party):
            memory.close()
            self._count("rings_left_out", 1)
            return
        seen = memory.seen()
        tail = self._first_tail(memory, seen.counts["head"])
        # What was timed before we came is read too, so what was lost before counts too.
        counted = seen.counts if tail else dict.fromkeys(seen.counts, 0)
        stacks = abi.Request.SITE if self._sites and self._sites.add(pid) else abi.Request.STACKS
        overhead_controller = OverheadController(self._budget)
        process = DeviceProcess(
            memory,
            Ring(memory.fd, tail),
            key,
            counted,
            same_tids(pid),
            overhead_controller,
            stacks,
            party=party,
            by_slots=slots_asked(pid),
        )
        per_second = overhead_controller.per_second
        memory.ask(tail=tail, per_second=per_second, request=process.request)
        memory.heartbeat()
        self._processes[pid] = process
        self._carried.set()
        if process.by_slots:
            self._slots.follow(*key, memory.fd)

    def _has_place(self, party: int) -> bool:
        """Whether one more process of this party may be read; another's makes room where it has
        more than its part."""
        if len(self._processes) < MOST_RINGS:
            return True
        held = Counter(process.party for process in self._processes.values())
        most, count = held.most_common(1)[0]
        if count <= held[party] + 1:
            return False
        self._drop(next(pid for pid, process in self._processes.items() if process.party == most))
        self._count("rings_left_out", 1)
        return True

    def _withhold(
        self, key: ProcessKey, before: tuple[ProcessKey, bool] | None, *, to_other: bool
    ) -> None:
        """Leave a process alone for now; report once where another agent has it."""
        self._withheld[key[0]] = (key, to_other)
        if to_other and before != (key, True):
            text = "its device time is read by another agent or recorder"
            now_ns = time.monotonic_ns()
            notice = EventRow(now_ns, "notice", "device_time_refused", *key, 1.0, text)
            self._notices.append(notice)

    def _ask_again(self, now_s: float) -> None:
        """Open what has become free, or was allowed again."""
        if now_s < self._ask_again_s:
            return
        self._ask_again_s = now_s + LOOK_AGAIN_S
        for pid in list(self._withheld):
            with suppress(OSError):
                self._open(pid)

    def _take_stacks_in_the_kernel(self) -> None:
        """Of processes whose library could not be probed before, and now can."""
        for pid in self._sites.due() if self._sites else ():
            process = self._processes.get(pid)
            if process and self._sites and self._sites.add(pid):
                process.stacks = abi.Request.SITE
                with suppress(OSError):
                    process.memory.want(process.request)

    @staticmethod
    def _first_tail(memory: InjectMemory, head: int) -> int:
        """Where to begin: with what a program that Sonde started has timed so far, else now."""
        tail = memory.control()["tail"]
        return tail if 0 <= head - tail <= abi.RING_RECORDS and tail == 0 else head
