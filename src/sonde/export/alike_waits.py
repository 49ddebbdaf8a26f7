# SPDX-License-Identifier: Apache-2.0
"""Waits in rows of a table: those of threads that wait alike together, idle ones last."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sonde.model.answers import Wait
from sonde.model.profile import ProfileKind
from sonde.query.wait_rows import Ints, Mask, WaitRows

SLEEPS = 0.9
"""Part of a thread's time off CPUs in sleeps, for one of a service that does nothing else."""


class AlikeWaits(NamedTuple):
    """The waits of the threads of a process for one reason in the same line of its program."""

    first: Wait
    """The longest."""
    threads: int
    ns: int
    waits: int
    max_ns: int
    waker: str
    """Who ended most of them: another thread, or 'one another'."""
    is_idle: bool


class AlikeRows:
    """All waits of a kind, the longest together first; last those of threads that are idle, or of
    the kernel."""

    def __init__(self, every: WaitRows, kind: ProfileKind) -> None:
        is_of_kind = every.is_off_cpu == (kind == ProfileKind.OFF_CPU)
        rows: Ints = np.flatnonzero(is_of_kind & ~every.of_sonde)
        self._every = every
        self._idle = (every.idle | every.for_requests | _sleeps_beside_requests(every))[rows]
        is_last = self._idle | every.is_kernel[rows]
        hints, of_row = every.hints(rows)
        number: dict[str, int] = {}
        # A wait without a place in the program is like no other one.
        place = np.array([number.setdefault(it.location, len(number)) for it in hints] or [0])
        has_place = np.array([bool(it.location) for it in hints] or [False])
        alone = len(number) + np.arange(len(rows))
        places = np.where(has_place[of_row], place[of_row], alone) if len(rows) else alone
        columns = (every.process, every.reason, every.system_call)
        of_group = _together(*(one[rows] for one in columns), places, is_last)
        ns = np.bincount(of_group, every.ns[rows])
        last = np.zeros(len(ns), bool)
        last[of_group] = is_last
        self._groups: Ints = np.lexsort((-ns, last))
        self._order: Ints = np.lexsort((-every.ns[rows], of_group))
        self._starts: Ints = np.searchsorted(of_group[self._order], np.arange(len(ns) + 1))
        self._rows = rows

    def __len__(self) -> int:
        return len(self._groups)

    def at(self, place: int) -> AlikeWaits:
        """One row. Raises IndexError."""
        group = int(self._groups[place])
        mine = self._order[self._starts[group] : self._starts[group + 1]]
        every, rows = self._every, self._rows[mine]
        first = every[int(rows[0])]
        return AlikeWaits(
            first=first,
            threads=len(np.unique(every.thread[rows])),
            ns=int(every.ns[rows].sum()),
            waits=int(every.events[rows].sum()),
            max_ns=int(every.max_ns[rows].max()),
            waker=first.waker if len(rows) == 1 else self._waker(rows),
            is_idle=bool(self._idle[mine[0]]) and not bool(every.is_kernel[rows[0]]),
        )

    def _waker(self, rows: Ints) -> str:
        """Who ended most of these waits of several threads."""
        texts, index = self._every.wakers(rows)
        ended = np.bincount(index, self._every.ns[rows], len(texts))
        names = self._every.labels(rows)
        theirs = [at for at, text in enumerate(texts) if text and text not in names]
        if theirs:
            return texts[max(theirs, key=lambda at: ended[at])]
        return "one another" if any(texts) else ""


def _sleeps_beside_requests(every: WaitRows) -> Mask:
    """Whether each wait is of a thread that does nothing but sleep, in a process of which others
    wait for requests: it is a timer of a service."""
    off, threads = every.is_off_cpu, int(every.thread.max(initial=-1)) + 1
    is_sleep = np.array([one == "sleep" for one in (*every.reasons, "")], bool)[every.reason] & off
    whole = np.bincount(every.thread, every.ns * off, threads)
    slept = np.bincount(every.thread, every.ns * is_sleep, threads)
    serves = np.zeros(threads, bool)
    serves[every.thread[every.for_requests]] = True
    served = np.unique(every.process[every.for_requests])
    sleeper = (slept > 0) & (slept >= SLEEPS * whole) & ~serves
    found: Mask = is_sleep & sleeper[every.thread] & np.isin(every.process, served)
    return found


def _together(*columns: npt.NDArray[Any]) -> Ints:
    """A number for each row, the same for rows with the same values."""
    number: Ints = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        wide = number * (int(column.max(initial=0)) + 1) + column.astype(np.int64)
        _, number = np.unique(wide, return_inverse=True)
    return number
