# SPDX-License-Identifier: Apache-2.0
"""When the names of Python's threads are read (`unwind.python_threads`), for the processes whose
threads rows refer to."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Final

from sonde import procfs
from sonde.agent.unwinding import Unwinding
from sonde.procfs.party_memory import PartyMemory
from sonde.resolve import Resolver
from sonde.resolve.lru_cache import LruCache
from sonde.resolve.tracked_process import TrackedProcess
from sonde.unwind import PythonThreads
from sonde.unwind.process_memory import ProcessMemory
from sonde.unwind.python_threads import FAILURES

MAX_PROCESSES: Final = 1024
MAX_SEEN: Final = 4_096
"""Threads of a process that are remembered as looked up; beyond it they are looked up again."""
MOST_BYTES: Final = 8 << 20
"""Memory of what is remembered of the threads of all processes, shared between parties
(`procfs.party_memory`)."""
SEEN_BYTES: Final = 64
"""Of a thread that was looked up: an entry of a set, and its number, ..."""
INSIDE_BYTES: Final = 160
"""... and the entry with its tid in another namespace."""
SOON_S: Final = 0.9
"""Between two reads of a process where rows have a thread that was not looked up: a tick."""
MAX_PAUSE_S: Final = 15.0
"""The same where all were looked up: each pause is twice the last one, as names hardly change."""
TIMES: Final = 200.0
"""The same at least, in times of the CPU time that the last read took: 0.5 % of a core where a
program begins threads all the time. Of 10 threads a read takes 2 ms, of 1,000 some 23 ms."""
MAX_RETRY_S: Final = 60.0
"""The same where it cannot be read."""
UPDATE_S: Final = 0.05
"""How long one update may take, and a process more: what is left is read at the next tick."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Known:
    """A process with a Python."""

    party: int
    """As procfs.party_of has it."""
    threads: PythonThreads
    runtime: int
    """Address of its _PyRuntime."""
    is_inside: bool
    """In a pid namespace below ours: its threads have other tids there."""
    seen: set[int] = field(default_factory=set)
    """Threads that were looked up."""
    inside: dict[int, int] = field(default_factory=dict)
    """Their tids in that namespace."""
    read_s: float = 0.0
    """When it was read last, CLOCK_MONOTONIC."""
    pause_s: float = 0.0
    used_s: float = 0.0
    """CPU time of the last read."""
    has_failed: bool = False

    @property
    def held_bytes(self) -> int:
        """Memory of its threads, about."""
        return SEEN_BYTES * len(self.seen) + INSIDE_BYTES * len(self.inside)

    def empty(self) -> None:
        """Forget its threads: they are looked up again."""
        self.seen, self.inside = set(), {}

    def is_due(self, tids: set[int], now_s: float) -> bool:
        """Whether to read it now. `tids`: threads that rows have."""
        is_new = not self.has_failed and not tids <= self.seen
        pause_s = min(self.pause_s, SOON_S) if is_new else self.pause_s
        return now_s >= self.read_s + max(pause_s, TIMES * self.used_s)


class ThreadNames:
    """Reads the names of threads, and gives them to `resolve`."""

    def __init__(self, resolver: Resolver, unwinding: Unwinding) -> None:
        self._resolver = resolver
        self._unwinding = unwinding
        self._known: LruCache[tuple[int, int], _Known] = LruCache(MAX_PROCESSES)
        self.memory = PartyMemory(MOST_BYTES)
        """Of all of these."""
        self.unread = 0
        """How often the names of a process could not be read, or its user or container had no CPU
        time left for names."""

    def update(self, threads: Iterable[tuple[int, int, int]]) -> None:
        """Read the names of processes that are due. `threads`: those that rows have, as (pid,
        start_ns, tid). A process's first thread keeps the kernel's name."""
        of_processes: dict[tuple[int, int], set[int]] = defaultdict(set)
        for pid, start_ns, tid in threads:
            if tid != pid:
                of_processes[pid, start_ns].add(tid)
        now_s = time.monotonic()
        due: list[tuple[float, tuple[int, int], _Known]] = []
        for key, tids in of_processes.items():
            loaded = self._unwinding.loaded_python_of(key)
            if loaded is None:
                continue
            python, runtime = loaded
            known = self._known.get(key)
            if known is None or known.runtime != runtime:
                credentials = procfs.read_credentials(key[0])
                is_inside = credentials is not None and credentials.levels > 1
                party = self._resolver.processes.find(*key).party
                known = _Known(party, PythonThreads(python, runtime), runtime, is_inside)
                self._known.put(key, known)
                self.memory.add(known)
            if known.is_due(tids, now_s):
                due.append((known.read_s, key, known))
        for _, key, known in sorted(due, key=itemgetter(0)):
            if time.monotonic() > now_s + UPDATE_S:
                break
            self._read(self._resolver.processes.find(*key), known, of_processes[key])

    def _read(self, process: TrackedProcess, known: _Known, tids: set[int]) -> None:
        if not process.is_alive:
            return
        held_bytes = known.held_bytes
        try:
            self._read_now(process, known, tids)
        finally:
            self.memory.grew(known.held_bytes - held_bytes)

    def _read_now(self, process: TrackedProcess, known: _Known, tids: set[int]) -> None:
        is_new = not tids <= known.seen
        known.read_s = time.monotonic()
        budget, party = self._resolver.python_budget, process.party
        if budget.is_over(party):
            self.unread += 1
            known.pause_s = SOON_S
            return
        memory = ProcessMemory(*process.key)
        began_s, child_s = time.thread_time(), procfs.BROKER.cpu_s()
        try:
            with budget.charged(party, free_s=0.0):
                names = known.threads.read(memory)
                if known.is_inside:
                    names = self._outside(process.pid, known, names, tids)
        except FAILURES:
            self.unread += 1
            known.has_failed = True
            known.pause_s = min(MAX_RETRY_S, 2 * max(known.pause_s, SOON_S))
            return
        finally:
            memory.close()
            used_s = time.thread_time() - began_s
            known.used_s = used_s + max(0.0, procfs.BROKER.cpu_s() - child_s)
        known.has_failed = False
        known.pause_s = SOON_S if is_new else min(MAX_PAUSE_S, 2 * known.pause_s)
        if len(known.seen) > MAX_SEEN:
            known.seen = set()  # clear() keeps its table
        known.seen.update(islice(tids, MAX_SEEN))
        self._resolver.processes.give_thread_names(process, names)

    @staticmethod
    def _outside(pid: int, known: _Known, names: dict[int, str], tids: set[int]) -> dict[int, str]:
        """Names by the tids that we know threads by."""
        if len(known.inside) > MAX_SEEN:
            known.inside = {}
        new = sorted(tids - known.inside.keys())[:MAX_SEEN]
        known.inside |= procfs.inner_tids(pid, new)
        return {tid: names[it] for tid in tids if (it := known.inside.get(tid, 0)) in names}
