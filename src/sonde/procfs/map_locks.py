# SPDX-License-Identifier: Apache-2.0
"""Which process keeps the kernel waiting, so that a uprobe must not be placed or removed now.

Placing a uprobe takes, for writing, the map lock (mmap_lock) of every process that has the file
mapped, once for each of its mappings of that place, and removing it does, too. Meanwhile no fork()
on the machine returns (kernel/events/uprobes.c, register_for_each_vma: dup_mmap_sem). Where a
process keeps that lock, by a page of a FUSE file that its server does not bring, the kernel waits,
for ever if need be; where one has 20,000 mappings of the place and threads that use the lock, for
seconds a function. So the mappings of the file are counted first, the locks of those who have any
are timed, and then every process is asked for its lock, by a child that can be given up.

For their locks all are asked, not those alone that map the file: nobody is overlooked, whatever
namespace he is in, however he has mapped it and whenever he came. Whether one that does not answer
has mapped the file is looked at then.

What remains: one that takes its lock, or maps the file so often, after it was asked; memory that
has outlived its processes, which nobody can ask for; before Linux 6.5 (6.1.37), one that keeps the
lock for reading alone.
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
"""Processes that do not answer, each within the broker's deadline, and have not mapped the file;
beyond that it is not known who has. Not a time: on a busy machine a new child takes a second."""
EXECUTING_S: Final = 2.0
"""So long one that executes a program is not asked again: a start looks at many files in a row."""
UNSURE_S: Final = 2.0
"""So long nothing is asked after an answer that was not had in time."""


class Why(Enum):
    """What keeps the kernel waiting, as words about a process."""

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
    """Asks all processes for their mappings of a file and for their map locks."""

    def __init__(self, broker: Broker = BROKER) -> None:
        self._broker = broker
        self._last: Holder | None = None
        self._executing: dict[int, float] = {}
        """Processes to be passed over, until (monotonic s) when."""
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
        if self._last is not None and self._last.pid in waiting:  # most likely it again
            waiting.remove(self._last.pid)
            waiting.insert(0, self._last.pid)
        try:
            return self._crowded(waiting, inode) or self._locked(waiting, inode)
        except OSError:  # no child to ask with
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
        """What is made of a process that does not answer, the `silent`-th of them."""
        has_mapped = self._broker.maps(pid, inode)
        if has_mapped:
            return Holder(pid, party_of(pid))
        if has_mapped is None:
            self._executing[pid] = time.monotonic() + EXECUTING_S
        return Holder(pid, party_of(pid), Why.UNKNOWN) if silent >= MAX_SILENT else None
