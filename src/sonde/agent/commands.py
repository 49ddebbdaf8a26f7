# SPDX-License-Identifier: Apache-2.0
"""When it is read what interpreters run (`procfs.scripts_of`), for the processes that rows refer
to: once in each process and program, while it runs.

A process that ends within its first tick stays without, and so may one of very many that begin at
once.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Set
from typing import Final

from sonde import procfs
from sonde.resolve import Resolver
from sonde.resolve.tracked_process import TrackedProcess

MOST_A_TICK: Final = 128
"""Processes of one user or container that are read in a tick: some 40 us each."""
UPDATE_S: Final = 0.03
"""How long one update may take to find interpreters, and again to read what they run, and one
party more: what is left is read at the next tick. Waits for processes have a bound of all looks
together (`procfs.looks`)."""


SLOW_S: Final = 0.005
"""A program's name that takes longer counts as a wait for its party's process."""


class Commands:
    """Reads what interpreters run, and notes it at their processes."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self.unread = 0
        """How often that of a process could not be read, or was put off."""

    def update(self, threads: Iterable[tuple[int, int, int]]) -> None:
        """Read those of new processes. `threads`: those that rows have, as (pid, start_ns, tid)."""
        found = [
            process
            for pid, start_ns in {(pid, start_ns) for pid, start_ns, _ in threads}
            if (process := self._resolver.processes.find(pid, start_ns)).command is None
            and process.is_alive
            and not process.is_kernel
        ]
        late = procfs.BROKER.late()
        due = self._interpreters(found, late)
        until_s = time.monotonic() + UPDATE_S
        budget = self._resolver.python_budget
        # Parties that made readers wait come last: they must not take the time of the others.
        for party, processes in sorted(due.items(), key=lambda it: (it[0] in late, len(it[1]))):
            is_over = budget.is_over(party) or time.monotonic() > until_s
            chosen = [] if is_over else processes[:MOST_A_TICK]
            self.unread += len(processes) - len(chosen)
            with budget.charged(party, free_s=0.0):
                self._read(chosen)

    def _interpreters(
        self, processes: list[TrackedProcess], late: Set[int]
    ) -> dict[int, list[TrackedProcess]]:
        """Those that run interpreters, by party, as far as they are found in time."""
        if late:
            processes.sort(key=lambda process: process.party in late)
        found: dict[int, list[TrackedProcess]] = defaultdict(list)
        began_s = now_s = time.monotonic()
        for number, process in enumerate(processes):
            if now_s - began_s > UPDATE_S:
                self.unread += len(processes) - number
                break
            before_s = now_s
            if any(map(procfs.is_interpreter, (process.exe, process.comm))):
                found[process.party].append(process)
            else:
                process.command = ""
            now_s = time.monotonic()
            if now_s - before_s > SLOW_S:
                procfs.BROKER.charge_look(process.party, now_s - before_s)
        return found

    def _read(self, processes: list[TrackedProcess]) -> None:
        found = procfs.scripts_of([process.pid for process in processes])
        for process, script in zip(processes, found, strict=True):
            self.unread += script is None
            process.command = script
