# SPDX-License-Identifier: Apache-2.0
"""Reports incidents of single processes and stalls of jobs so that one stall is one report.

Where a job stalls, each rank that waits for the missing one becomes slower, too: by a wait for a
lock, for an answer of another process, or of unknown cause. That wait belongs to the report on the
job. So an incident of a rank is kept back while its job pauses, until it is known what the pause
is: incidents of waiting ranks become evidence of the stall, all others are reported.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from sonde.diagnose.incident import FaultCause, Incident, RankReport
from sonde.diagnose.moments import Window

SAME_WAIT: Final = frozenset((FaultCause.LOCK, FaultCause.REMOTE_DEPENDENCY, FaultCause.UNKNOWN))
"""The causes by which a wait in a collective, or for a device, appears in a single process."""
HOLD_S: Final = 12.0
"""An incident is kept back for no longer."""
EARLIER_NS: Final = 1_500_000_000
"""The begin of an incident is an estimate: it may be this much before the stall that is its
cause."""
KEPT_NS: Final = 30_000_000_000
"""For so long after a stall's end, incidents that began in it may still come."""
MAX_HELD: Final = 16
"""Incidents that are kept back; more are reported at once."""
MAX_STALLS: Final = 64
"""That are remembered: the newest."""
SHOWN: Final = 4
"""Incidents that a report on a job lists; of others it has the number."""


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    incident: Incident
    window: Window
    until_s: float


@dataclass(slots=True)
class _Stall:
    since_ns: int
    """Since when the job is quiet."""
    waiting: frozenset[int]
    """Pids of ranks that wait for others."""
    missing: frozenset[int]
    """Pids of ranks that the others wait for."""
    ended_ns: int = 0
    """0: it goes on."""

    def has(self, incident: Incident) -> bool:
        """Whether an incident began during the stall, or up to EARLIER_NS before."""
        is_early = incident.began_ns < self.since_ns - EARLIER_NS
        return not is_early and not 0 < self.ended_ns < incident.began_ns


class StallReports:
    """Of one node. Methods may be called from any thread; `report` is called by one at a time."""

    def __init__(self, report: Callable[[Incident, Window], None]) -> None:
        """`report` is called with what is to be reported, from the thread that calls a method, or
        from a separate one."""
        self._report = report
        self._reporting = threading.Lock()
        self._lock = threading.Lock()
        self._may_be_due = threading.Condition(self._lock)
        self._quiet: dict[int, int] = {}
        """By pid of a rank: since when its job is quiet."""
        self._held: list[_Held] = []
        self._is_closed = False
        self._stalls: deque[_Stall] = deque(maxlen=MAX_STALLS)
        self.unreported = 0
        """Incidents of waiting ranks that are in no report: they came after the report on their
        job, or that report is of a change that is no fault. The loss `diagnose.waiting_ranks`."""

    def start(self, failed: Callable[[BaseException], None]) -> None:
        """Start a thread that reports what was kept back as soon as it is due. `failed` is called
        with the error of a report."""
        threading.Thread(
            target=self._run, args=(failed,), name="sonde-reports", daemon=True
        ).start()

    def update(self, now_ns: int, quiet: Iterable[tuple[Collection[int], int]]) -> None:
        """Take in which jobs are quiet: the ranks of each, and since when. Reports nothing."""
        with self._lock:
            self._quiet = {pid: since_ns for pids, since_ns in quiet for pid in pids}
            for stall in self._stalls:
                ranks = stall.waiting | stall.missing
                goes_on = any(self._quiet.get(pid) == stall.since_ns for pid in ranks)
                if not stall.ended_ns and not goes_on:
                    stall.ended_ns = now_ns
            while self._stalls and 0 < self._stalls[0].ended_ns < now_ns - KEPT_NS:
                self._stalls.popleft()
            if self._held:
                self._may_be_due.notify()

    def offer(self, incident: Incident, window: Window) -> None:
        """Report an incident of one process, unless it is part of a stall, or may be."""
        with self._lock:
            if self._is_part(incident):
                self.unreported += 1
                return
            has_room = len(self._held) < MAX_HELD and not self._is_closed
            if has_room and self._may_be_part(incident):
                self._held.append(_Held(incident, window, time.monotonic() + HOLD_S))
                self._may_be_due.notify()
                return
        self._pass_on([(incident, window)])

    def stalled(self, incident: Incident, window: Window) -> None:
        """Report the stall of a job, be it a fault or a change, and incidents of its ranks that are
        no part of it."""
        ranks = incident.verdict.ranks
        waiting = frozenset(one.pid for one in ranks if not one.is_missing)
        missing = frozenset(one.pid for one in ranks) - waiting
        stall = _Stall(incident.began_ns, waiting, missing)
        with self._lock:
            self._stalls.append(stall)
            its = [it for it in self._held if it.incident.victim in waiting | missing]
            parts = [it for it in its if it.incident.victim in waiting and stall.has(it.incident)]
            free = [it for it in its if it not in parts]
            self._held = [it for it in self._held if it not in its]
            if not incident.verdict.is_fault:
                self.unreported += len(parts)
        whole = _with_parts(incident, [it.incident for it in parts], ranks)
        self._pass_on([(whole, window), *((it.incident, it.window) for it in free)])

    def _run(self, failed: Callable[[BaseException], None]) -> None:
        while self._wait_until_due():
            try:
                self.release()
            except Exception as error:  # the thread must go on with the next ones
                failed(error)

    def _wait_until_due(self) -> bool:
        """Wait until something that was kept back may be reported; False: closed."""
        with self._lock:
            while not self._is_closed and not any(map(self._is_due, self._held)):
                next_s = min((it.until_s for it in self._held), default=None)
                wait_s = None if next_s is None else max(0.0, next_s - time.monotonic())
                self._may_be_due.wait(wait_s)
            return not self._is_closed

    def _is_due(self, one: _Held) -> bool:
        """Whether it was kept back for long enough, or for a pause that was no stall."""
        return time.monotonic() >= one.until_s or one.incident.victim not in self._quiet

    def release(self) -> None:
        """Report what was kept back for long enough, or for a pause that was no stall."""
        with self._reporting:  # until all is reported: `close` waits for it
            with self._lock:
                due = [it for it in self._held if self._is_due(it)]
                self._held = [it for it in self._held if it not in due]
            for it in due:
                self._report(it.incident, it.window)

    def close(self) -> None:
        """Report all that is kept back; from now on nothing is."""
        with self._lock:
            self._is_closed = True
            self._may_be_due.notify()
            free, self._held = self._held, []
        self._pass_on((it.incident, it.window) for it in free)

    def _is_part(self, incident: Incident) -> bool:
        return _looks_like_stall(incident) and any(
            incident.victim in it.waiting and it.has(incident) for it in self._stalls
        )

    def _may_be_part(self, incident: Incident) -> bool:
        since_ns = self._quiet.get(incident.victim, 0)
        if not since_ns or not _looks_like_stall(incident):
            return False
        if any(it.since_ns == since_ns and incident.victim in it.missing for it in self._stalls):
            return False
        return incident.began_ns >= since_ns - EARLIER_NS

    def _pass_on(self, found: Iterable[tuple[Incident, Window]]) -> None:
        with self._reporting:
            for incident, window in found:
                self._report(incident, window)


def _looks_like_stall(incident: Incident) -> bool:
    return incident.verdict.is_fault and incident.verdict.cause in SAME_WAIT


def _with_parts(
    incident: Incident, parts: Iterable[Incident], ranks: Iterable[RankReport]
) -> Incident:
    """The incident of a job, with those of waiting ranks as evidence of the likeliest cause."""
    numbers = {one.pid: one.rank for one in ranks}
    found = [
        f"rank {numbers[one.victim]} ({one.victim}) is slower by this wait: {_text(one)}"
        for one in parts
    ]
    candidates = incident.verdict.candidates
    if not found or not candidates:
        return incident
    more = (f"{len(found) - SHOWN} more waiting ranks are slower",) if len(found) > SHOWN else ()
    evidence = (*candidates[0].evidence, *found[:SHOWN], *more)
    first = msgspec.structs.replace(candidates[0], evidence=evidence)
    verdict = msgspec.structs.replace(incident.verdict, candidates=(first, *candidates[1:]))
    return msgspec.structs.replace(incident, verdict=verdict)


def _text(incident: Incident) -> str:
    first = next(iter(incident.verdict.candidates), None)
    if first is None or not first.evidence:
        return str(incident.verdict.cause)
    return f"{incident.verdict.cause}: {first.evidence[0]}"
