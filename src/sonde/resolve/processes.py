# SPDX-License-Identifier: Apache-2.0
"""The table of processes: names, threads, mappings, by (pid, start time).

/proc shows the processes that run already. From then on the kernel's process events (perf records
of fork, exec, mmap, comm, exit) keep the table up to date, so that short processes are known as
well. An ended process is kept for a while, because its last samples are read after its end.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from sys import getsizeof
from typing import Final

from sonde import procfs
from sonde._native import CommEvent, ExitEvent, ForkEvent, MmapEvent, ProcessEvent
from sonde.resolve.binary import FileKey
from sonde.resolve.counters import Counters
from sonde.resolve.given_names import GivenNames, shown_name
from sonde.resolve.held_mappings import MAX_MAPPINGS_HELD, HeldMappings
from sonde.resolve.process_image import ProcessImage
from sonde.resolve.queued_paths import QueuedPaths
from sonde.resolve.tracked_process import TrackedProcess

GRACE_NS: Final = 15_000_000_000
"""How long the names of an ended process are kept. Its mappings go at the second tick after."""
SWEEP_NS: Final = 60_000_000_000
"""How often /proc is checked for processes that ended without an event."""
MAX_PROCESSES: Final = 16_384
"""Alive and recently ended; beyond, those that ended first are evicted, then those unused
longest."""
STEP_DAEMON: Final = "slurmstepd"
"""Name of the program that starts and supervises the steps of a Slurm job."""
MAX_SEEN_FILES: Final = 65_536
"""Files remembered so that `new_files` has each of them once."""
MAX_THREAD_NAMES: Final = 98_304
"""Of all processes together, some 24 MB."""
_FEW_THREADS: Final = 16
"""Unknown threads of one process that are looked up one by one."""
_EAGER_MAPS: Final = 512
"""Processes whose mappings are read at the start, in case they end before they are sampled."""
_EAGER_S: Final = 0.05
"""How long that may take beside a loop that drains the kernel ..."""
_FIRST_EAGER_S: Final = 2.0
"""... and before there is one."""
_MANY_ENDED: Final = 8
"""From this many ended processes on, one listing of /proc is cheaper than a check of each."""
MAX_HEADLESS_CHECKED: Final = 64
"""Headless processes that are checked in a tick."""
_SAME_START_NS: Final = 2 * procfs.START_UNIT_NS
"""Greatest difference between the time of a fork event and the start time in /proc."""


class ProcessTable:
    """All processes, alive and recently ended, by (pid, start_ns)."""

    def __init__(
        self,
        counters: Counters | None = None,
        max_processes: int = MAX_PROCESSES,
        grace_ns: int = GRACE_NS,
    ) -> None:
        self.counters = counters or Counters()
        self.grace_ns = grace_ns
        """How long the names of ended processes are kept; may be changed."""
        self.new_files: list[tuple[TrackedProcess, FileKey]] = []
        """Files mapped for the first time, and by which process. The caller empties it."""
        self.new_steps: list[tuple[TrackedProcess, TrackedProcess]] = []
        """(program, slurmstepd that started it). The caller empties it."""
        self._seen_files: set[FileKey] = set()
        self._max = max_processes
        self._live: dict[int, TrackedProcess] = {}
        self._dead: dict[int, list[TrackedProcess]] = {}
        self._ended_order: deque[TrackedProcess] = deque()
        """The processes of `_dead` in the order in which they ended."""
        self._given = GivenNames()
        self._queued = QueuedPaths(self._all)
        self._held = HeldMappings(self._all, self.counters)
        self._headless: dict[int, TrackedProcess] = {}
        """Processes whose first thread has ended while others run. No exit event shows by itself
        that it is of the last one, so /proc is checked."""
        self._ended_now: list[TrackedProcess] = []
        """Ended since the last tick. Their last samples come with the next tick."""
        self._ended_before: list[TrackedProcess] = []
        """Ended before the last tick."""
        self._now_ns = 0
        """When the last tick ended; CLOCK_MONOTONIC."""
        self._boot_offset_ns = 0
        """CLOCK_BOOTTIME less CLOCK_MONOTONIC."""
        self._next_sweep_ns = 0
        self._has_scanned = False

    def __len__(self) -> int:
        return len(self._live) + len(self._ended_order)

    @property
    def live(self) -> int:
        """Number of processes that run, as far as is known."""
        return len(self._live)

    def scan(self) -> None:
        """Add every process of /proc that is not in the table, and mark those that are gone."""
        pids = procfs.pids()
        for pid in self._live.keys() - set(pids):
            self._mark_ended(self._live[pid], time.monotonic_ns())
        eager = _EAGER_MAPS
        is_first, self._has_scanned = not self._has_scanned, True
        eager_until_s = time.monotonic() + (_FIRST_EAGER_S if is_first else _EAGER_S)
        for pid, found in zip(pids, procfs.read_stats(pids, is_patient=is_first), strict=True):
            known = self._live.get(pid)
            if found is None or (known is not None and known.start_ns == found.start_ns):
                continue
            process = self._from_proc(pid, found)
            has_room = self._held.total < MAX_MAPPINGS_HELD // 2
            if eager and has_room and time.monotonic() < eager_until_s and process.exe:
                process.read_ahead()
                eager -= 1

    def resync(self) -> None:
        """Events were lost: scan /proc again, and read mappings again when they are used."""
        for process in self._live.values():
            process.image = ProcessImage(process.pid, "proc")
            process.forget_frames()
        self.scan()

    def reread(self, pids: Iterable[int]) -> None:
        """Events of these processes were left out: take in what they are now."""
        for pid in pids:
            found = procfs.read_stat(pid)
            process = self._live.get(pid)
            if found is None:
                if process is not None:
                    self._mark_ended(process, time.monotonic_ns())
                continue
            if process is None or abs(process.start_ns - found.start_ns) > _SAME_START_NS:
                self._from_proc(pid, found)
                continue
            process.on_exec(time.monotonic_ns())  # it may have executed another program
            process.image = ProcessImage(pid, "proc")
            process.set_thread_name(pid, found.comm)
            process.may_have_threads = found.threads != 1

    def feed(self, events: Iterable[ProcessEvent]) -> None:
        """Apply process events, in order of time."""
        self._boot_offset_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.clock_gettime_ns(
            time.CLOCK_MONOTONIC
        )
        for event in events:
            if isinstance(event, MmapEvent):
                self._on_mmap(event)
            elif isinstance(event, CommEvent):
                self._on_comm(event)
            elif isinstance(event, ForkEvent):
                self._on_fork(event)
            else:
                self._on_exit(event)

    def find(self, pid: int, start_ns: int) -> TrackedProcess:
        """The process; one without names where nothing is known of it any more."""
        process = self._live.get(pid)
        if process is None or process.start_ns != start_ns:
            process = self._find_other(pid, start_ns)
        process.used_ns = self._now_ns
        return process

    def start_of(self, pid: int) -> int:
        """`start_ns` of the process that has this pid now; 0 where none is known."""
        process = self._live.get(pid)
        return process.start_ns if process is not None else 0

    def last_of(self, pid: int) -> TrackedProcess | None:
        """The process that has this pid, or the last that is known to have had it."""
        return self._live.get(pid) or next(reversed(self._dead.get(pid, ())), None)

    def parent(self, process: TrackedProcess) -> TrackedProcess | None:
        """The parent of a process, None where it is unknown."""
        found = self.last_of(process.ppid)
        return found if found is not process else None

    def thread_names(self, process: TrackedProcess, tids: Sequence[int]) -> list[str]:
        """The names of threads of a process, as `thread_name`. A process may claim any number of
        threads in what it reports itself: of many, only those that it has are looked up."""
        known = process.threads or {}
        new = sum(tid not in known for tid in tids) if process.is_alive else 0
        there = procfs.tids(process.pid) if new > _FEW_THREADS else None
        return [self.thread_name(process, tid, there) for tid in tids]

    def thread_name(
        self, process: TrackedProcess, tid: int, there: Container[int] | None = None
    ) -> str:
        """The name of a thread, '' where it is unknown. The first thread has the kernel's name,
        others that of a runtime where it gives them one. `there`: threads that it has now, where
        that is known."""
        name = self._kernel_name(process, tid, there)
        given = process.given_names.get(tid) if process.given_names and tid != process.pid else None
        return name if given is None else shown_name(name, given, process.comm)

    def _kernel_name(self, process: TrackedProcess, tid: int, there: Container[int] | None) -> str:
        name = process.threads.get(tid) if process.threads else None
        if name is None:
            is_there = process.is_alive and (there is None or tid in there)
            name = procfs.read_comm(process.pid, tid) if is_there else None
            if name is None:
                return process.comm if tid == process.pid else ""
            self.counters.threads_evicted += process.set_thread_name(tid, name)
        return name

    def give_thread_names(self, process: TrackedProcess, names: Mapping[int, str]) -> None:
        """Note the names that a runtime gives the threads of a process, by thread id. Those of
        earlier calls stay, as rows may still refer to threads that have ended."""
        self.counters.thread_names_left_out += self._given.add(process, names, self._all)

    def _all(self) -> Iterator[TrackedProcess]:
        return chain(self._live.values(), self._ended_order)

    def expire(self, now_ns: int) -> None:
        """End a tick, up to which samples are resolved: drop what no later sample needs."""
        self._now_ns = now_ns
        self._check_headless(now_ns)
        for process in self._ended_before:
            if not process.is_alive:
                process.forget_image()
        self._ended_before, self._ended_now = self._ended_now, []
        expired = []
        while self._ended_order and self._ended_order[0].dead_ns + self.grace_ns <= now_ns:
            expired.append(self._ended_order[0])
            self._remove_ended(expired[-1])
        pids = set(procfs.pids()) if len(expired) >= _MANY_ENDED else None
        for process in expired:
            if pids is None or process.pid in pids:
                self._restore_if_alive(process)
        self._bound_mappings()
        self._bound_thread_names()
        if now_ns >= self._next_sweep_ns:
            self._next_sweep_ns = now_ns + SWEEP_NS
            self._sweep(now_ns)

    def _bound_mappings(self) -> None:
        """Drop images from before old execs, and mappings beyond what all may hold."""
        for process in self._all():
            if process.previous is not None and process.previous_until_ns < self._now_ns:
                process.previous = None
        self._queued.recount(self._held.recount())

    def _bound_thread_names(self) -> None:
        """Drop the names of threads until MAX_THREAD_NAMES are left: each time of the process with
        most, of the party that has most. Those of threads that run are read again."""
        count = sum(len(it.threads) for it in self._all() if it.threads)
        if count <= MAX_THREAD_NAMES:
            return
        parties: defaultdict[int, list[TrackedProcess]] = defaultdict(list)
        for process in sorted(self._all(), key=lambda it: len(it.threads or ())):
            if process.threads:
                parties[process.party].append(process)
        held = {party: sum(len(it.threads or ()) for it in its) for party, its in parties.items()}
        while count > MAX_THREAD_NAMES:
            most = max(held, key=held.__getitem__)
            process = parties[most].pop()
            dropped, process.threads = len(process.threads or ()), None
            held[most] -= dropped
            count -= dropped
            self.counters.threads_evicted += dropped

    def _count_left_out(self, image: ProcessImage) -> None:
        self.counters.mappings_left_out += image.left_out
        image.left_out = 0

    def _sweep(self, now_ns: int) -> None:
        """End processes that /proc does not show."""
        for pid in self._live.keys() - set(procfs.pids()):
            self._mark_ended(self._live[pid], now_ns)

    def _restore_if_alive(self, process: TrackedProcess) -> None:
        """Put a process back whose first thread has ended while others still run."""
        found = procfs.read_stat(process.pid)
        same = found is not None and found.start_ns == process.start_ns
        if same and process.pid not in self._live and procfs.has_threads(process.pid):
            process.dead_ns = 0
            process.image = ProcessImage(process.pid, "proc")
            self._live[process.pid] = process

    def _on_mmap(self, event: MmapEvent) -> None:
        process = self._known(event.pid, event.time_ns)
        image = process.image
        path_bytes = getsizeof(event.path)
        if image.has_room(path_bytes) and self._queued.admit(process, path_bytes):
            image.add(event)
            self._held.note_queued(path_bytes)
        else:
            image.left_out += 1
        if image.left_out:
            self._count_left_out(image)
        file = event.file
        if file[2] and file not in self._seen_files:
            if len(self._seen_files) >= MAX_SEEN_FILES:
                self._seen_files.clear()
            self._seen_files.add(file)
            self.new_files.append((process, file))

    def _on_comm(self, event: CommEvent) -> None:
        process = self._known(event.pid, event.time_ns)
        if event.is_exec:
            process.on_exec(event.time_ns)
            self._headless.pop(event.pid, None)  # the thread that executed is its first one now
            parent = self._live.get(process.ppid)
            if parent is not None and parent.comm == STEP_DAEMON:
                self.new_steps.append((process, parent))
            if process.dead_ns:  # another thread executed, and became the first one
                self._remove_ended(process)
                process.dead_ns = 0
                self._live[event.pid] = process
        name = procfs.printable(event.comm)
        self.counters.threads_evicted += process.set_thread_name(event.tid, name)

    def _on_fork(self, event: ForkEvent) -> None:
        pid = event.pid
        parent = self._known(event.parent_pid, event.time_ns)
        if pid == event.parent_pid:
            name = parent.threads.get(event.parent_tid) if parent.threads else None
            parent.may_have_threads = True
            if parent.given_names:
                parent.given_names.pop(event.tid, None)
            if name is not None:
                self.counters.threads_evicted += parent.set_thread_name(event.tid, name)
            elif parent.threads:
                parent.threads.pop(event.tid, None)  # the name of an earlier thread with this id
            return
        start = event.time_ns + self._boot_offset_ns
        start -= start % procfs.START_UNIT_NS
        old = self._live.get(pid)
        if old is not None:
            if abs(old.start_ns - start) <= _SAME_START_NS:
                return  # known from /proc already
            self._mark_ended(old, event.time_ns)
        image = parent.forked_image(pid)
        child = TrackedProcess(pid, start, event.parent_pid, parent.comm, image)
        child.set_exe(parent.exe)
        child.command = parent.command
        child.party_of_parent = parent.party_for_child()
        child.used_ns = self._now_ns
        self._insert(child)

    def _on_exit(self, event: ExitEvent) -> None:
        process = self._live.get(event.pid)
        # An event older than the entry from /proc is about an earlier process with this pid.
        if (
            process is not None
            and event.tid == event.pid
            and process.start_ns <= event.time_ns + self._boot_offset_ns
        ):
            if process.may_have_threads and self._goes_on(process):
                self._headless[process.pid] = process
            else:
                self._mark_ended(process, event.time_ns)

    def _goes_on(self, process: TrackedProcess) -> bool:
        """Whether any of its threads still runs."""
        found = procfs.read_stat(process.pid)
        is_same = found is not None and abs(found.start_ns - process.start_ns) <= _SAME_START_NS
        return is_same and found is not None and found.goes_on

    def _check_headless(self, now_ns: int) -> None:
        """End headless processes whose last thread has ended; others go to the end of the queue."""
        for pid, process in list(islice(self._headless.items(), MAX_HEADLESS_CHECKED)):
            del self._headless[pid]
            if self._live.get(pid) is not process:
                continue
            if self._goes_on(process):
                self._headless[pid] = process
            else:
                self._mark_ended(process, now_ns)

    def _known(self, pid: int, time_ns: int) -> TrackedProcess:
        """The process of an event, read from /proc where its fork was not seen."""
        process = self.last_of(pid)
        if process is None:
            found = procfs.read_stat(pid)
            if found is not None:
                return self._from_proc(pid, found)
            process = TrackedProcess(pid, 0, 0, "", ProcessImage(pid, "proc"))
            process.used_ns = time_ns
            self._insert(process)
        return process

    def _find_other(self, pid: int, start_ns: int) -> TrackedProcess:
        """A process that is not in `_live` under this start time.

        It has ended, or is known with a slightly different start time, or only /proc knows it.
        """
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
        process = TrackedProcess(pid, start_ns, 0, "", ProcessImage(pid, "exec"))
        self._insert(process, alive=False)
        return process

    def _from_proc(self, pid: int, found: procfs.Stat) -> TrackedProcess:
        old = self._live.get(pid)
        if old is not None:
            self._mark_ended(old, time.monotonic_ns())
        process = TrackedProcess(
            pid, found.start_ns, found.ppid, found.comm, ProcessImage(pid, "proc")
        )
        process.used_ns = time.monotonic_ns()
        process.may_have_threads = found.threads != 1
        self._insert(process)
        if found.threads > 1 and procfs.memory_task(pid) != pid:
            self._headless[pid] = process
        return process

    def _insert(self, process: TrackedProcess, alive: bool = True) -> None:
        if len(self) >= self._max:
            self._evict()
        process.held = self._held
        if alive:
            self._live[process.pid] = process
        else:
            self._mark_ended(process, time.monotonic_ns())

    def _evict(self) -> None:
        """Drop an eighth: processes that ended first, then those unused for longest."""
        goal = self._max - self._max // 8
        while self._ended_order and len(self) > goal:
            self._ended_order[0].forget_image()
            self._remove_ended(self._ended_order[0])
            self.counters.processes_evicted += 1
        if len(self) > goal:
            by_use = sorted(self._live.values(), key=lambda it: it.used_ns)
            for process in by_use[: len(self) - goal]:
                del self._live[process.pid]
                self.counters.processes_evicted += 1

    def _mark_ended(self, process: TrackedProcess, now_ns: int) -> None:
        """Move a process to the ended ones."""
        process.dead_ns = now_ns
        if self._live.get(process.pid) is process:
            del self._live[process.pid]
        self._dead.setdefault(process.pid, []).append(process)
        self._ended_order.append(process)
        self._ended_now.append(process)

    def _remove_ended(self, process: TrackedProcess) -> None:
        self._ended_order.remove(process)
        same_pid = self._dead[process.pid]
        same_pid.remove(process)
        if not same_pid:
            del self._dead[process.pid]
