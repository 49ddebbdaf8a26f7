# SPDX-License-Identifier: Apache-2.0
"""Which process keeps its memory map locked, so that a uprobe must not be placed or removed now.

Placing a uprobe takes, for writing, the map lock (mmap_lock) of every process that has the file
mapped, and removing it does, too. Where a process keeps that lock, by a page of a FUSE file that
its server does not bring, the kernel waits, for ever if need be, and no fork() on the machine
returns meanwhile (kernel/events/uprobes.c, register_for_each_vma: dup_mmap_sem). So every process
is asked for its lock first, by a child that can be given up.

All are asked, not those alone that map the file: that costs less than to find these, and nobody is
overlooked, whatever namespace he is in, however he has mapped it and whenever he came. Whether one
that does not answer has mapped the file is looked at then.

What remains: one that takes its lock after it was asked; memory that has outlived its processes,
which nobody can ask for; before Linux 6.5 (6.1.37), one that keeps the lock for reading alone.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Final

from sonde.procfs.broker import BROKER, Broker
from sonde.procfs.parties import name_of, party_of
from sonde.procfs.processes import pids

MAX_SILENT: Final = 4
"""Processes that do not answer, each within the broker's deadline, and have not mapped the file;
beyond that it is not known who has. Not a time: on a busy machine a new child takes a second."""
EXECUTING_S: Final = 2.0
"""So long one that executes a program is not asked again: a start looks at many files in a row."""
UNSURE_S: Final = 2.0
"""So long nothing is asked after an answer that was not had in time."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that keeps its map locked."""

    pid: int
    party: int
    is_sure: bool = True
    """It has the file mapped; else that was not known in time."""

    def __str__(self) -> str:
        who = f"process {self.pid} of {name_of(self.party)}"
        if self.is_sure:
            return f"{who} maps it and keeps its memory map locked"
        return f"{who} keeps its memory map locked, and whether one that maps it does is not known"


class MapLocks:
    """Asks all processes for their map locks."""

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
        if found is not None and not found.is_sure:
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
        pid = silent = 0
        try:
            while (found := self._broker.first_locked(waiting)) is not None:
                pid = found
                has_mapped = self._broker.maps(pid, inode)
                if has_mapped:
                    return Holder(pid, party_of(pid))
                if has_mapped is None:
                    self._executing[pid] = time.monotonic() + EXECUTING_S
                silent += 1
                if silent >= MAX_SILENT:
                    return Holder(pid, party_of(pid), is_sure=False)
                del waiting[: waiting.index(pid) + 1]
        except OSError:  # no child to ask with
            return Holder(pid or os.getpid(), party_of(pid or os.getpid()), is_sure=False)
        return None
