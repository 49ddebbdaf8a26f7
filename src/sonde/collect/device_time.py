# SPDX-License-Identifier: Apache-2.0
"""What devices did, and for how long, of every process that carries the injected library.

A process carries it because somebody attached it or started it with it; here it is found, sent
heartbeats, and asked how many launches a second to time (`overhead_controller`). What it puts into
its ring is read by `device_records`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from sonde import procfs
from sonde._native import ForkEvent, MmapEvent, ProcessEvent
from sonde.collect import inject_abi as abi
from sonde.collect.carriers import may_carry, same_tids
from sonde.collect.collector import Batch, Collector, ProcessKey
from sonde.collect.device_process import DeviceProcess, Finder
from sonde.collect.device_records import RunReader
from sonde.collect.inject_memory import LIBRARY, InjectMemory, Seen
from sonde.collect.inject_records import Ring
from sonde.collect.launch_sites import LaunchSites
from sonde.collect.overhead_controller import OverheadController
from sonde.collect.ring_budget import KEPT_BYTES
from sonde.collect.slots import Slots, slots_asked
from sonde.procfs.party_memory import PartyMemory

LOOK_AGAIN_S: Final = 10.0
"""How often processes that had no library are looked at again."""
LOOK_WITH_EVENTS_S: Final = 300.0
"""The same where process events report a library as soon as it is mapped."""
FEW: Final = 8
"""Processes whose parents are looked up one by one."""
YOUNG_S: Final = 10.0
"""Processes younger than this are looked at in every tick, where there are no events."""
SOON_S: Final = 1.0
"""How long a process that has mapped the library is given to make its memory."""
SILENT_NS: Final = 1_500_000_000
"""A library whose thread was silent for this long may be gone: an exec may have replaced its
program."""
MAX_RINGS: Final = 256
"""Processes whose rings are read."""


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
        """`budget`: of each program's time, the share that timing its launches may take.

        `sites`: takes stacks in the kernel; without, the library follows frame pointers.

        `has_events`: process events report each library as soon as it is mapped, so that there is
        seldom need to scan processes for it.
        """
        self._sites = sites
        self._pids = None if pids is None else frozenset(pids)
        self._budget = budget
        self._processes: dict[int, DeviceProcess] = {}
        self._looked: dict[int, tuple[int, float]] = {}
        """By pid: start, and when (monotonic s) it was looked at last."""
        self._replaced: list[DeviceProcess] = []
        """Programs that an exec replaced, whose rings are to be read once more."""
        self._has_events = has_events
        self._look_s = 0.0
        """When (monotonic s) to look through all processes, though there are events."""
        self._reader = RunReader()
        self._kept = PartyMemory(KEPT_BYTES)
        self._finder = Finder()
        self._slots = Slots()
        self._withheld: dict[int, tuple[ProcessKey, bool]] = {}
        """By pid: processes that carry the library and are not ours to read; True: another agent
        reads them, False: somebody wants them left alone. No event comes when that ends."""
        self._ask_again_s = 0.0
        """When (monotonic s) those are tried again."""
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
        return bool(self._processes or self._finder.is_waiting or self._replaced)

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
                # Looked at again, as either may have come before clear() and set it in vain.
                if not self._processes and not self._stopped.is_set():
                    self._carried.wait()
            with self._closing:
                for process in list(self._processes.values()):
                    with suppress(OSError):
                        process.memory.heartbeat()

    def on_process_events(self, events: Sequence[ProcessEvent]) -> None:
        """Open the memory of processes that have just mapped the library, so that one that soon
        ends is seen, too."""
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
                    if self._finder.has_credit(party):  # else after SILENT_NS
                        self._check_replaced(pid)
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
        self._reader.add_notices(now_ns, batch)
        if not self._paused:
            self._ask_again(now_ns / 1e9)
            self._take_stacks_in_the_kernel()
        if not self._processes and not self._replaced and not looks:
            return batch
        alive = set(procfs.pids())  # listed first: the ring of one that ended by now is still read
        seen = self._seen()
        self._take_stacks(batch)  # after that: every run counted there has its stack by now
        for pid in self._reader.drain_all(self._processes, seen, since_ns, now_ns, batch):
            self._drop(pid)
        for pid, one in seen.items():
            if now_ns - one.counts["polled_ns"] > SILENT_NS:
                self._check_replaced(pid)
        self._reader.add_slowdown(self._processes.values(), now_ns, batch)
        self._drain_replaced(since_ns, now_ns, batch)
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
        """Detach from all processes: their libraries go idle."""
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
        """Ask the libraries for nothing; they wait."""
        self._paused = True
        for process in self._processes.values():
            with suppress(OSError):
                process.memory.want(0)

    def resume(self) -> None:
        """Ask for the same as before."""
        self._paused = False
        for process in self._processes.values():
            with suppress(OSError):
                process.memory.want(process.request)
                process.memory.heartbeat()
        self._look(time.monotonic())

    def losses(self) -> Mapping[str, int]:
        """What was lost so far, by name."""
        counted = dict(self._reader.losses, slots_unread=self._slots.failed)
        counted["slots_late"] = self._slots.late
        counted["processes_unread"] = self._finder.unread.processes
        counted["caches_emptied"] = self._kept.emptied
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
            process.ring.keep_stack_id(correlation, stack_id)

    def _check_replaced(self, pid: int) -> None:
        """Find out whether an exec replaced a program whose library is read; if so the process is
        looked for again, as the new one may carry a library, too."""
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
            self._replaced.append(self._processes.pop(pid))
            self._looked.pop(pid, None)
            if self._sites:
                self._sites.drop(pid)

    def _drain_replaced(self, since_ns: int, now_ns: int, batch: Batch) -> None:
        replaced, self._replaced = self._replaced, []
        if replaced:
            self._reader.drain_replaced(replaced, since_ns, now_ns, batch)
        for process in replaced:
            with self._closing:
                process.memory.close()

    def _drop(self, pid: int) -> None:
        self._slots.drop(pid)
        with self._closing:
            process = self._processes.pop(pid, None)
            if process:
                self._reader.count("records_unread", process.ring.waiting(process.head))
                process.memory.close()
                if self._sites:
                    self._sites.drop(pid)

    # ---- finding them ------------------------------------------------------------------------

    def _look(self, now_s: float) -> None:
        """Open the memory of processes that carry a library and are not read yet."""
        due = [pid for pid in procfs.pids() if self._is_due(pid, now_s)]
        stats = zip(due, procfs.read_stats(due), strict=True)
        there = {pid: stat.start_ns for pid, stat in stats if stat is not None}
        self._looked |= {pid: (start_ns, now_s) for pid, start_ns in there.items()}
        for pid in self._wanted(list(there)):
            if may_carry(pid):
                with suppress(OSError):
                    self._open(pid)

    def _is_due(self, pid: int, now_s: float) -> bool:
        if pid in self._processes:
            return False
        known = self._looked.get(pid)
        if known is not None:
            start_ns, looked_s = known
            young = now_s - start_ns / 1e9 < YOUNG_S
            if not young and now_s - looked_s < LOOK_AGAIN_S:
                return False
        return True

    def _wanted(self, pids: Sequence[int]) -> list[int]:
        """Those that were asked for or descend from one. Of many, all descendants are looked up at
        once; those that pid 1 adopted are not its descendants (`procfs.descends`)."""
        if self._pids is None or len(pids) <= FEW:
            return [pid for pid in pids if self._is_wanted(pid)]
        wanted = procfs.family(set(self._pids) - {1}).union(self._pids)
        return [pid for pid in pids if pid in wanted]

    def _is_wanted(self, pid: int) -> bool:
        """Is it one of the processes asked for, or a descendant of one?"""
        return self._pids is None or procfs.descends(pid, self._pids)

    def _open(self, pid: int) -> None:
        party = procfs.party_of(pid)
        memory = self._finder.find(pid, party)
        if memory is None:
            return
        try:
            self._take(pid, party, memory)
        finally:  # any call may fail: the process may have sealed its memory against writing
            if pid not in self._processes:
                memory.close()
                if self._sites:
                    self._sites.drop(pid)

    def _take(self, pid: int, party: int, memory: InjectMemory) -> None:
        """Read this memory from now on, or leave it alone. Raises OSError."""
        stat = procfs.read_stat(pid)
        before = self._withheld.pop(pid, None)
        if stat is None:
            return
        key = (pid, stat.start_ns)
        is_detached = memory.is_detached()
        if is_detached or not memory.lock():
            self._withhold(key, before, to_other=not is_detached)
            return
        if not self._has_room(party):
            self._reader.leave_out(party)
            return
        seen = memory.seen()
        tail = self._first_tail(memory, seen.counts["head"])
        # At tail 0 all that was ever timed is read, so all that was ever lost counts, too.
        counted = seen.counts if tail else dict.fromkeys(seen.counts, 0)
        stacks = abi.Request.SITE if self._sites and self._sites.add(pid) else abi.Request.STACKS
        overhead_controller = OverheadController(self._budget)
        process = DeviceProcess(
            memory,
            Ring(memory.fd, tail, self._kept, party),
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
        if process.by_slots:
            self._slots.follow(*key, memory.fd)
        self._processes[pid] = process
        self._carried.set()

    def _has_room(self, party: int) -> bool:
        """Whether one more process of this party may be read. Where there are MAX_RINGS, one of the
        party that has most is dropped for it, if that has at least two more than this one."""
        if len(self._processes) < MAX_RINGS:
            return True
        held = Counter(process.party for process in self._processes.values())
        most, count = held.most_common(1)[0]
        if count <= held[party] + 1:
            return False
        self._drop(next(pid for pid, process in self._processes.items() if process.party == most))
        self._reader.leave_out(most)
        return True

    def _withhold(
        self, key: ProcessKey, before: tuple[ProcessKey, bool] | None, *, to_other: bool
    ) -> None:
        """Leave a process alone for now; report once where another agent reads it (`to_other`)."""
        self._withheld[key[0]] = (key, to_other)
        if to_other and before != (key, True):
            text = "its device time is read by another agent or recorder"
            self._reader.note(key, "device_time_refused", text)

    def _ask_again(self, now_s: float) -> None:
        """Open the withheld processes that nobody else reads, and that are allowed again."""
        if now_s < self._ask_again_s:
            return
        self._ask_again_s = now_s + LOOK_AGAIN_S
        for pid in list(self._withheld):
            with suppress(OSError):
                self._open(pid)

    def _take_stacks_in_the_kernel(self) -> None:
        """Where the library of a process could not be probed before, and now can."""
        for pid in self._sites.due() if self._sites else ():
            process = self._processes.get(pid)
            if process and self._sites and self._sites.add(pid):
                process.stacks = abi.Request.SITE
                with suppress(OSError):
                    process.memory.want(process.request)

    @staticmethod
    def _first_tail(memory: InjectMemory, head: int) -> int:
        """Where to begin to read: at 0, where nobody has read and nothing is overwritten yet, as in
        a program that Sonde started; else at `head`."""
        tail = memory.control()["tail"]
        return tail if 0 <= head - tail <= abi.RING_RECORDS and tail == 0 else head
