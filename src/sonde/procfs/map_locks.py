# SPDX-License-Identifier: Apache-2.0
"""Which process keeps the kernel waiting, so that a uprobe must not be placed or removed now.

Placing a uprobe takes, for writing, the map lock (mmap_lock) of every process that has the file
mapped, once for each of its mappings of that place, and removing it does, too. Meanwhile no fork()
on the machine returns (kernel/events/uprobes.c, register_for_each_vma: dup_mmap_sem). Where a
process keeps that lock, by a page of a FUSE file that its server does not bring, the kernel waits,
for ever if need be; where one has 20,000 mappings of the place and threads that use the lock, for
seconds for each probed function. So the mappings of the file are counted first, and the locks of
processes that have any are timed. Then the lock of every process is tried, by a child that can be
given up.

The locks of all processes are tried, not only of those that map the file: so none is overlooked, in
any namespace, however it maps the file and whenever it was started. Only of one whose lock cannot
be had it is looked up whether it maps the file.

Not covered: a process that takes its lock, or maps the file so often, after it was looked at;
memory that has outlived its processes, which is in no /proc/PID; before Linux 6.5 (6.1.37), a
process that keeps the lock for reading alone.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from sonde.procfs.broker import BROKER, Broker
from sonde.procfs.map_costs import too_much
from sonde.procfs.parties import name_of, party_of
from sonde.procfs.processes import pids

MAX_SILENT: Final = 4
"""Processes whose locks cannot be had and that have not mapped the file: from this number on a look
ends, and who else maps it is not known. No time: on a busy machine a new child takes a second."""
EXECUTING_S: Final = 2.0
"""How long the lock of a process that executes a program is not tried again: when Sonde starts,
many files are looked at in a row."""
UNSURE_S: Final = 2.0
"""How long the answer UNKNOWN is given again without a look."""


class Why(Enum):
    """Why a process keeps the kernel waiting, in words that follow its name."""

    LOCKED = "maps it and keeps its memory map locked"
    UNKNOWN = "keeps its memory map locked, and whether one that maps it does is not known"
    CROWDED = "maps it so often, or keeps its memory map so busy, that forks would wait"


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that keeps the kernel waiting."""

    pid: int
    party: int
    why: Why = Why.LOCKED

    def __str__(self) -> str:
        return f"process {self.pid} of {name_of(self.party)} {self.why.value}"


class MapLocks:
    """Looks at the mappings and tries the map locks of all processes."""

    def __init__(self, broker: Broker = BROKER) -> None:
        self._broker = broker
        self._last: Holder | None = None
        self._executing: dict[int, float] = {}
        """Processes that execute a program: until when (time.monotonic) they are skipped."""
        self._unsure_until_s = 0.0

    def holder(self, inode: int) -> Holder | None:
        """A process that keeps uprobes in a file (by its inode as mappings show it) waiting; None
        where there is none now."""
        now_s = time.monotonic()
        if now_s < self._unsure_until_s and self._last is not None:
            return self._last
        found = self._ask(inode)
        self._last = found or self._last
        if found is not None and found.why is Why.UNKNOWN:
            self._unsure_until_s = time.monotonic() + UNSURE_S
        return found

    def _ask(self, inode: int) -> Holder | None:
        now_s = time.monotonic()
        self._executing = {pid: end_s for pid, end_s in self._executing.items() if now_s < end_s}
        passed = {os.getpid(), *self._executing}
        waiting = [pid for pid in pids() if pid not in passed]
        if self._last is not None and self._last.pid in waiting:  # most likely the same again
            waiting.remove(self._last.pid)
            waiting.insert(0, self._last.pid)
        try:
            return self._crowded(waiting, inode) or self._locked(waiting, inode)
        except OSError:  # no child
            return Holder(os.getpid(), party_of(os.getpid()), Why.UNKNOWN)

    def _crowded(self, whos: Sequence[int], inode: int) -> Holder | None:
        costs: dict[int, list[tuple[int, int, float]]] = defaultdict(list)
        silent = 0
        while True:
            found, hung = self._broker.map_costs(whos, inode)
            for cost in found:
                costs[party_of(cost[0])].append(cost)
            if hung is None:
                break
            silent += 1
            if holder := self._silent(hung, inode, silent):
                return holder
            whos = whos[whos.index(hung) + 1 :]
        for party, of_party in costs.items():
            if (pid := too_much(of_party)) is not None:
                return Holder(pid, party, Why.CROWDED)
        return None

    def _locked(self, whos: Sequence[int], inode: int) -> Holder | None:
        silent = 0
        while (hung := self._broker.first_locked(whos)) is not None:
            silent += 1
            if holder := self._silent(hung, inode, silent):
                return holder
            whos = whos[whos.index(hung) + 1 :]
        return None

    def _silent(self, pid: int, inode: int, silent: int) -> Holder | None:
        """A process that did not answer, number `silent` so far, as a holder; None: it is none."""
        has_mapped = self._broker.maps(pid, inode)
        if has_mapped:
            return Holder(pid, party_of(pid))
        if has_mapped is None:
            self._executing[pid] = time.monotonic() + EXECUTING_S
        return Holder(pid, party_of(pid), Why.UNKNOWN) if silent >= MAX_SILENT else None
