# SPDX-License-Identifier: Apache-2.0
"""How the kernel gives the chosen processes CPUs: their nice values, and the CPUs that they may
use."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from sonde import procfs
from sonde.model.rows import EventRow

NICE: Final = "nice"
CPUS_ALLOWED: Final = "cpus_allowed"
"""Names of the rows of `event`, of kind process."""
MOST: Final = 256
"""Processes that are asked about."""


def scheduling_rows(pids: Iterable[int], now_ns: int) -> list[EventRow]:
    """Two rows of `event` for each process that is there. `value` is the nice value of its first
    thread (getpriority(2)), and how many CPUs its affinity and its cpuset leave it
    (sched_getaffinity(2))."""
    rows = []
    for pid in sorted(pids)[:MOST]:
        stat = procfs.read_stat(pid)
        if stat is None:
            continue
        with suppress(OSError):  # it may have ended
            nice = os.getpriority(os.PRIO_PROCESS, pid)
            allowed = len(os.sched_getaffinity(pid))
            for name, value in ((NICE, nice), (CPUS_ALLOWED, allowed)):
                row = EventRow(now_ns, "process", name, pid, stat.start_ns, float(value), "")
                rows.append(row)
    return rows
