# SPDX-License-Identifier: Apache-2.0
"""Names of kernel threads that ended waits of chosen processes (ksoftirqd, kworker): they have no
rows in such a recording, so nothing else in it names them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sonde import procfs
from sonde.model.process import KTHREADD_PID
from sonde.model.rows import ActivityTuple, EventRow

EVENT: Final = "kernel_thread"
"""Name of the rows of `event`, of kind process; `text` is the name."""
MAX_KNOWN: Final = 4_096
"""Threads that are remembered as looked at; beyond, none is looked at any more."""
MOST: Final = 64
"""That are looked at in one tick."""
_BLOCKED: Final = "blocked"
_RUNQUEUE: Final = "runqueue"


class KernelWakers:
    """The kernel threads among those that ended waits."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def rows(self, activity: Iterable[ActivityTuple], now_ns: int) -> list[EventRow]:
        """Rows of `event` on the kernel threads that were not known yet, by rows of waits."""
        wakers = {
            row[14]
            for row in activity
            # A kernel thread is the first thread of its process, and the only one.
            if row[14] == row[15] and row[1] in (_BLOCKED, _RUNQUEUE)
        }
        new = sorted(wakers - self._known - {0})[:MOST]
        if len(self._known) + len(new) > MAX_KNOWN:
            return []
        self._known.update(new)
        stats = zip(new, procfs.read_stats(new), strict=True) if new else ()
        return [
            EventRow(now_ns, "process", EVENT, pid, stat.start_ns, 0.0, stat.comm)
            for pid, stat in stats
            if stat is not None and KTHREADD_PID in (pid, stat.ppid)
        ]
