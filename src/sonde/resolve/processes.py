# SPDX-License-Identifier: Apache-2.0
"""Which processes there are and were: names, threads, mappings, told apart by (pid, start).

Two sources: /proc for what runs already, and the kernel's own stream of events for what happens
from then on, so that a process of 50 ms is known as well as one of a week. A process that ended is
kept for a while, because the samples of its last moments are read after its death.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Final

from sonde import procfs
from sonde._native import CommEvent, ExitEvent, ForkEvent, MmapEvent, ProcessEvent
from sonde.resolve.counters import Counters
from sonde.resolve.images import Image
from sonde.resolve.live import LiveProcess
from sonde.resolve.mappings import FileKey

GRACE_NS: Final = 15_000_000_000
"""How long the names of a dead process are kept. Its mappings go at the second tick after it."""
SWEEP_NS: Final = 60_000_000_000
"""How often /proc is asked which processes vanished without an event."""
MAX_PROCESSES: Final = 16_384
STEP_KEEPER: Final = "slurmstepd"
MAX_SEEN_FILES: Final = 65_536
MAX_MAPPINGS_HELD: Final = 262_144
"""Of all processes together: some 100 MB. A thousand common ones hold 50,000."""
_EAGER_MAPS: Final = 512
"""Processes whose mappings are read at the start, in case they end before they are asked about."""
_MANY_GONE: Final = 8
_SAME_START_NS: Final = 2 * procfs.START_UNIT_NS
"""An event's time and the start it stands for differ by a little."""


class ProcessTable:
    """All processes. Feed it events in order of time; ask it by (pid, start_ns)."""

    def __init__(
        self,
        counters: Counters | None = None,
        max_processes: int = MAX_PROCESSES,
        grace_ns: int = GRACE_NS,
    ) -> None:
        self.counters = counters or Counters()
        self._grace_ns = grace_ns
        self.new_files: list[tuple[LiveProcess, FileKey]] = []
        """Files mapped by processes since this was last emptied; of each file the first time."""
        self.new_steps: list[tuple[LiveProcess, LiveProcess]] = []
        """Programs that a keeper of Slurm's steps started, and the keeper, since last emptied."""
        self._seen_files: set[FileKey] = set()
        self._max = max_processes
        self._live: dict[int, LiveProcess] = {}
        self._dead: dict[int, list[LiveProcess]] = {}
        self._graves: deque[LiveProcess] = deque()
        """The dead in the order in which they ended."""
        self._just_died: list[LiveProcess] = []
        """Since the last tick; their samples come with the next one."""
        self._died_before: list[LiveProcess] = []
        self._now_ns = 0
        self._boot_offset_ns = 0
        self._next_sweep_ns = 0

    def __len__(self) -> int:
        return len(self._live) + len(self._graves)

    @property
    def live(self) -> int:
        """Processes that run, as far as is known."""
        return len(self._live)

    def scan(self) -> None:
        """Take in every process that /proc shows, and what is known wrongly about those."""
        pids = procfs.pids()
        for pid in self._live.keys() - set(pids):
            self._retire(self._live[pid], time.monotonic_ns())
        eager = _EAGER_MAPS
        for pid, found in zip(pids, procfs.read_stats(pids), strict=True):
            known = self._live.get(pid)
            if found is None or (known is not None and known.start_ns == found.start_ns):
                continue
            process = self._from_proc(pid, found)
            if eager and process.exe:
                process.image.read_ahead()
                eager -= 1

    def resync(self) -> None:
        """Events were lost: mappings are read anew when they are asked for."""
        for process in self._live.values():
            process.image = Image(process.pid, "proc")
            process.forget_frames()
        self.scan()

    def feed(self, events: Iterable[ProcessEvent]) -> None:
        """Take in what processes did, in order of time."""
        self._boot_offset_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.clock_gettime_ns(
            time.CLOCK_MONOTONIC
        )
        for event in events:
            if isinstance(event, MmapEvent):
                self._mapped(event)
            elif isinstance(event, CommEvent):
                self._named(event)
            elif isinstance(event, ForkEvent):
                self._forked(event)
            else:
                self._ended(event)

    def find(self, pid: int, start_ns: int) -> LiveProcess:
        """The process; one without names where nothing is known about it any more."""
        process = self._live.get(pid)
        if process is None or process.start_ns != start_ns:
            process = self._find_other(pid, start_ns)
        process.used_ns = self._now_ns
        return process

    def parent(self, process: LiveProcess) -> LiveProcess | None:
        """Its parent, as far as is known."""
        found = self._live.get(process.ppid)
        if found is None:
            found = next(reversed(self._dead.get(process.ppid, ())), None)
        return found if found is not process else None

    def thread_name(self, process: LiveProcess, tid: int) -> str:
        """Name of a thread, '' unknown."""
        name = process.threads.get(tid) if process.threads else None
        if name is None:
            name = procfs.read_comm(process.pid, tid) if process.is_alive else None
            if name is None:
                return process.comm if tid == process.pid else ""
            self.counters.threads_evicted += process.renamed(tid, name)
        return name

    def expire(self, now_ns: int) -> None:
        """A tick is over: samples up to it are resolved. Forget what no sample will ask about."""
        self._now_ns = now_ns
        for process in self._died_before:
            if not process.is_alive:
                process.forget_image()
        self._died_before, self._just_died = self._just_died, []
        gone = []
        while self._graves and self._graves[0].dead_ns + self._grace_ns <= now_ns:
            gone.append(self._graves[0])
            self._bury(gone[-1])
        # One look at all of /proc costs as much as a few files of it.
        there = set(procfs.pids()) if len(gone) >= _MANY_GONE else None
        for process in gone:
            if there is None or process.pid in there:
                self._return_if_alive(process)
        self._bound_mappings()
        if now_ns >= self._next_sweep_ns:
            self._next_sweep_ns = now_ns + SWEEP_NS
            self._sweep(now_ns)

    def _bound_mappings(self) -> None:
        """Hold no more mappings than MAX_MAPPINGS_HELD: the process with most of them loses its
        own, and what it runs stays unnamed until it executes something."""
        held = 0
        for process in self._live.values():
            image = process.image
            if image.left_out:
                self._count_left_out(image)
            held += image.size
        if held <= MAX_MAPPINGS_HELD:
            return
        for process in sorted(self._live.values(), key=lambda it: it.image.size, reverse=True):
            if held <= MAX_MAPPINGS_HELD:
                break
            held -= process.image.size
            self.counters.mappings_left_out += process.image.size
            process.image = Image(process.pid, "exec")
            process.forget_frames()

    def _count_left_out(self, image: Image) -> None:
        self.counters.mappings_left_out += image.left_out
        image.left_out = 0

    def _sweep(self, now_ns: int) -> None:
        for pid in self._live.keys() - set(procfs.pids()):
            self._retire(self._live[pid], now_ns)
        for process in self._live.values():
            if process.previous is not None and process.previous_until_ns < now_ns:
                process.previous = None

    def _return_if_alive(self, process: LiveProcess) -> None:
        """Its first thread ended, but others may go on."""
        found = procfs.read_stat(process.pid)
        same = found is not None and found.start_ns == process.start_ns
        if same and process.pid not in self._live and procfs.has_threads(process.pid):
            process.dead_ns = 0
            process.image = Image(process.pid, "proc")
            self._live[process.pid] = process

    def _mapped(self, event: MmapEvent) -> None:
        process = self._known(event.pid, event.time_ns)
        image = process.image
        image.add(event)
        if image.left_out:
            self._count_left_out(image)
        file = event.file
        if file[2] and file not in self._seen_files:
            if len(self._seen_files) >= MAX_SEEN_FILES:
                self._seen_files.clear()
            self._seen_files.add(file)
            self.new_files.append((process, file))

    def _named(self, event: CommEvent) -> None:
        process = self._known(event.pid, event.time_ns)
        if event.is_exec:
            process.executed(event.time_ns)
            parent = self._live.get(process.ppid)
            if parent is not None and parent.comm == STEP_KEEPER:
                self.new_steps.append((process, parent))
            if process.dead_ns:  # a thread other than the first one executed, and took its place
                self._bury(process)
                process.dead_ns = 0
                self._live[event.pid] = process
        name = procfs.printable(event.comm)
        self.counters.threads_evicted += process.renamed(event.tid, name)

    def _forked(self, event: ForkEvent) -> None:
        pid = event.pid
        parent = self._known(event.parent_pid, event.time_ns)
        if pid == event.parent_pid:
            name = parent.threads.get(event.parent_tid) if parent.threads else None
            if name is not None:
                self.counters.threads_evicted += parent.renamed(event.tid, name)
            elif parent.threads:
                parent.threads.pop(event.tid, None)  # of an earlier thread with this id
            return
        start = event.time_ns + self._boot_offset_ns
        start -= start % procfs.START_UNIT_NS
        old = self._live.get(pid)
        if old is not None:
            if abs(old.start_ns - start) <= _SAME_START_NS:
                return  # /proc told of it before the event came
            self._retire(old, event.time_ns)
        image = parent.image.forked(pid)
        child = LiveProcess(pid, start, event.parent_pid, parent.comm, image)
        child.set_exe(parent.exe)
        child.used_ns = self._now_ns
        self._enter(child)

    def _ended(self, event: ExitEvent) -> None:
        process = self._live.get(event.pid)
        # An event may be older than what /proc told: then it speaks of an earlier process.
        if (
            process is not None
            and event.tid == event.pid
            and process.start_ns <= event.time_ns + self._boot_offset_ns
        ):
            self._retire(process, event.time_ns)

    def _known(self, pid: int, time_ns: int) -> LiveProcess:
        """The process that an event is about, found in /proc where its birth was not seen."""
        process = self._live.get(pid)
        if process is None:
            process = next(reversed(self._dead.get(pid, ())), None)
        if process is None:
            found = procfs.read_stat(pid)
            if found is not None:
                return self._from_proc(pid, found)
            process = LiveProcess(pid, 0, 0, "", Image(pid, "proc"))
            process.used_ns = time_ns
            self._enter(process)
        return process

    def _find_other(self, pid: int, start_ns: int) -> LiveProcess:
        """Whom an event told of with a start a little off, who died, or whom nobody told of."""
        live, dead = self._live.get(pid), self._dead.get(pid, [])
        candidates = [live, *dead] if live else dead
        for process in candidates:
            if process.start_ns == start_ns:
                return process
        for process in candidates:
            if not process.start_ns or abs(process.start_ns - start_ns) <= _SAME_START_NS:
                process.start_ns = start_ns
                return process
        found = procfs.read_stat(pid)
        if found is not None and found.start_ns == start_ns:
            return self._from_proc(pid, found)
        self.counters.processes_unknown += 1
        process = LiveProcess(pid, start_ns, 0, "", Image(pid, "exec"))
        self._enter(process, alive=False)
        return process

    def _from_proc(self, pid: int, found: procfs.Stat) -> LiveProcess:
        old = self._live.get(pid)
        if old is not None:
            self._retire(old, time.monotonic_ns())
        process = LiveProcess(pid, found.start_ns, found.ppid, found.comm, Image(pid, "proc"))
        process.used_ns = time.monotonic_ns()
        self._enter(process)
        return process

    def _enter(self, process: LiveProcess, alive: bool = True) -> None:
        if len(self) >= self._max:
            self._make_room()
        if alive:
            self._live[process.pid] = process
        else:
            self._retire(process, time.monotonic_ns())

    def _make_room(self) -> None:
        """Drop an eighth: those that died first, then those not asked about for longest."""
        goal = self._max - self._max // 8
        while self._graves and len(self) > goal:
            self._bury(self._graves[0])
            self.counters.processes_evicted += 1
        if len(self) > goal:
            by_use = sorted(self._live.values(), key=lambda it: it.used_ns)
            for process in by_use[: len(self) - goal]:
                del self._live[process.pid]
                self.counters.processes_evicted += 1

    def _retire(self, process: LiveProcess, now_ns: int) -> None:
        """It ended; keep it for a while."""
        process.dead_ns = now_ns
        if self._live.get(process.pid) is process:
            del self._live[process.pid]
        self._dead.setdefault(process.pid, []).append(process)
        self._graves.append(process)
        self._just_died.append(process)

    def _bury(self, process: LiveProcess) -> None:
        """It is no longer among the dead."""
        self._graves.remove(process)
        same_pid = self._dead[process.pid]
        same_pid.remove(process)
        if not same_pid:
            del self._dead[process.pid]
