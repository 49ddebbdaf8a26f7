# SPDX-License-Identifier: Apache-2.0
"""Notices, tick by tick, that a process loses time that it did not lose before.

The baseline of each series is the median of the last seconds and its median absolute deviation
(robust: Rousseeuw and Croux 1993); a rise counts that is both many deviations and a share of time
worth reporting. Two ticks in a row, or one that is far out, make a suspicion. What follows is
explained, and most suspicions end there: only a verdict that names a fault becomes an incident.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from sonde.diagnose.device_watch import DeviceWatch
from sonde.diagnose.moments import CodePlace, Moment, Place, ProcessMoment
from sonde.diagnose.series import (
    NETWORK_REASONS,
    OF_STACKS,
    PACE_FALL,
    SURE,
    UNSURE,
    Series,
    moves_bytes,
    values,
)

BASELINE_S = 15.0
"""How far back the baseline reaches: it follows what changes slowly, and what has stayed."""
SEEN_S = 1.0
"""A process that is known for longer than this may be active (`is_active`)."""
LEAST_S = 3.0
"""A process younger than this has no baseline, so is no victim."""
RECENT_TICKS = 2
"""The last ticks, which are compared with the baseline before them."""
LEAST_KNOWN = 6
"""Ticks with stacks that a series of stacks is compared with, at least."""
DEVIATIONS = 5.0
"""A rise counts from this many standard deviations of the baseline on."""
FAR_OUT = 2.5
"""A rise of this many times what counts is believed after one tick."""
LEAST_PART = 0.3
"""A rise of `Series.LOCK` counts by the usual CPU time, as if that were this many CPUs at least and
one at most."""
LARGE = 0.3
"""Seconds a second, or a share: a rise this large counts however much the series varied before."""
WORKS_ON = 0.95
"""A process that uses more than this part of its usual CPU time works as before."""
NORMAL = 1.4826
"""Standard deviation divided by median absolute deviation, of a normal distribution."""
DISK_S = 3.0
"""For this long after its last request a wait may be for a disk: limits hold requests back."""
LEAST_CPU = 0.03
"""A process that used fewer CPUs before is no victim."""
LEAST_PACE = 6.0
"""Fewer pieces of work a second show nothing about half a second."""
STEADY_PACE = 0.5
"""A standard deviation above this part of the median makes a pace, or CPU time, show nothing."""
REST_S = 12.0
"""For this long after a suspicion there is none of the same process by the same series: until the
baseline has followed."""
FORGETS = 0.98
"""Factor for older time at a place, each time that the thread waits there again."""
SOCKET_PLACES = 256
"""Pairs of thread and place kept of a process, those that came last."""
WATCHED = 512
"""Processes that are kept, those that were seen last."""
BOUNDS = (*SURE.items(), *UNSURE.items())


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A process may have become slower."""

    pid: int
    began_ns: int
    """Start of the first tick that was out of the ordinary."""
    noticed_ns: int
    series: tuple[Series, ...]
    """Those that rose."""
    lost: float = 0.0
    """Largest rise among them."""
    since_ns: int = 0
    """Start of what it is compared with."""


@dataclass(slots=True)
class _Watched:
    """What is kept of one process."""

    ticks: deque[tuple[int, int, dict[Series, float]]] = field(default_factory=deque)
    """(start, end, values)"""
    rests_until_ns: int = 0
    """No further suspicion by the series in `suspected` before."""
    suspected: frozenset[Series] = frozenset()
    """The series of its suspicions since `rests_until_ns` was last over."""
    sockets: dict[tuple[int, int], float] = field(default_factory=dict)
    """Time in sockets by thread and place, older time counting less (`FORGETS`)."""
    is_active: bool = False
    """It uses a CPU, and has done so for a while."""
    active_ns: int = 0
    """The end of the tick by which `is_active` was found out."""
    devices: DeviceWatch = field(default_factory=DeviceWatch)
    moved_ns: int = 0
    """When it read or wrote on a device last."""

    def note_sockets(self, places: list[Place]) -> None:
        """Take in where threads waited in sockets."""
        for place in places:
            if place.reason in NETWORK_REASONS and place.place:
                key = place.tid, place.place
                self.sockets[key] = self.sockets.get(key, 0.0) * FORGETS + place.ns
        while len(self.sockets) > SOCKET_PLACES:
            del self.sockets[next(iter(self.sockets))]

    def usual(self) -> dict[int, int]:
        """The place at which each thread mostly waits in sockets: for requests, if it serves others
        and asks some itself."""
        found: dict[int, tuple[float, int]] = {}
        for (tid, place), ns in self.sockets.items():
            found[tid] = max(found.get(tid, (0.0, 0)), (ns, place))
        return {tid: place for tid, (_, place) in found.items()}

    def find_active(self) -> bool:
        """`is_active`, by the last tick."""
        end_ns = self.ticks[-1][1]
        if end_ns != self.active_ns:
            self.active_ns = end_ns
            span_ns = end_ns - self.ticks[0][0]
            if span_ns > SEEN_S * 1e9:
                used = sum((end - start) * row[Series.CPU] for start, end, row in self.ticks)
                self.is_active = used > LEAST_CPU * span_ns
        return self.is_active


class Detector:
    """All processes of a node."""

    def __init__(self, mine: Container[int] = ()) -> None:
        """`mine`: processes of Sonde, which are no victims."""
        self._mine = mine
        self._watched: dict[int, _Watched] = {}
        self.is_alert = False
        """A series of some process rose in the last tick: the next one may make it a suspicion."""

    def add(
        self,
        moment: Moment,
        places: list[CodePlace],
        kernel: Container[int],
        chosen: Iterable[int] | None = None,
        stacks_since_ns: Callable[[int], int] = lambda _: 1,
    ) -> list[Suspicion]:
        """Take in a tick; returns the processes that may have become slower in it. `kernel`:
        threads of the kernel. `chosen`: processes that are watched; all where not given.
        `stacks_since_ns`: from when on stacks of a process are usable; 0: they are not."""
        found = []
        self.is_alert = False
        idle = ProcessMoment()
        for pid in moment.processes if chosen is None else chosen:
            if pid in self._mine or pid in kernel:
                continue
            one = moment.processes.get(pid, idle)
            watched = self._watched.pop(pid, None) or _Watched()
            self._watched[pid] = watched  # the last one in order
            if moves_bytes(one):
                watched.moved_ns = moment.end_ns
            has_disk = moment.end_ns - watched.moved_ns < DISK_S * 1e9 and watched.moved_ns > 0
            in_sockets = any(place.reason in NETWORK_REASONS for place in one.places)
            usual = watched.usual() if in_sockets else {}
            now = values(one, moment.seconds, places, kernel, pid, has_disk, usual)
            now |= watched.devices.take(one, moment.seconds)
            if watched.devices.is_settling:
                watched.ticks.clear()
            watched.note_sockets(one.places)
            watched.ticks.append((moment.start_ns, moment.end_ns, now))
            while len(watched.ticks) > 1 and moment.end_ns - watched.ticks[0][0] > BASELINE_S * 1e9:
                watched.ticks.popleft()
            suspicion, is_alert = _judge(pid, watched, stacks_since_ns(pid))
            self.is_alert |= is_alert
            if suspicion is None:
                continue
            if moment.end_ns >= watched.rests_until_ns:
                watched.suspected = frozenset()
            if not watched.suspected.issuperset(suspicion.series):  # something else than before
                watched.rests_until_ns = moment.end_ns + int(REST_S * 1e9)
                watched.suspected |= frozenset(suspicion.series)
                found.append(suspicion)
        while len(self._watched) > WATCHED:
            del self._watched[next(iter(self._watched))]
        return found

    def may_be_victim(self, pid: int) -> bool:
        """Whether a process is known, and has used enough CPU time to be a victim."""
        watched = self._watched.get(pid)
        return watched is not None and watched.find_active()

    def latest(self, end_ns: int) -> dict[int, dict[Series, float]]:
        """The series of the tick that ended then, by process."""
        return {
            pid: watched.ticks[-1][2]
            for pid, watched in self._watched.items()
            if watched.ticks[-1][1] == end_ns
        }

    def forget_rest(self, pid: int) -> None:
        """A suspicion was unfounded: the process may be suspected again at once."""
        if (watched := self._watched.get(pid)) is not None:
            watched.rests_until_ns = 0


def _judge(pid: int, watched: _Watched, stacks_since_ns: int) -> tuple[Suspicion | None, bool]:
    """The suspicion that the last ticks of a process give rise to, and whether a series rose in the
    last one, which the next one may confirm. What is costly is asked last: most ticks show that
    nothing can have risen."""
    ticks = watched.ticks
    if len(ticks) <= RECENT_TICKS or ticks[-1][1] - ticks[0][0] < LEAST_S * 1e9:
        return None, False
    now = ticks[-1][2]
    bounds = [
        (series, least, spread)
        for series, (least, spread) in BOUNDS
        if now[series] > least * (LEAST_PART if series == Series.LOCK else 1)
    ]
    if not bounds:
        return None, False
    before = list(islice(ticks, len(ticks) - RECENT_TICKS))
    recent = [ticks[at] for at in range(-RECENT_TICKS, 0)]
    rows = [row for _, _, row in before]
    cpu = 0.0
    changed: dict[Series, int] = {}
    is_alert = False
    for series, least, spread in bounds:
        known = rows
        if series in OF_STACKS:
            # Before there were stacks it was 0: that they are there now is no rise.
            known = [row for start_ns, _, row in before if start_ns >= stacks_since_ns > 0]
            if len(known) < LEAST_KNOWN:
                continue
        elif series == Series.LOCK:  # a server that does little loses much by a short wait
            cpu = cpu or _usual(Series.CPU, rows)
            part = min(1.0, max(LEAST_PART, cpu))
            least, spread = least * part, spread * part
        since = _rise(series, known, recent, least, spread)
        if since is None:
            continue
        cpu = cpu or _usual(Series.CPU, rows)
        if cpu < LEAST_CPU:
            return None, False
        is_alert = True
        if not since:
            continue
        if series in UNSURE and not (
            _slower(rows, recent, cpu, _usual(Series.PACE, rows))
            or (series == Series.LOCK and _works_on(recent, cpu))
        ):
            continue
        changed[series] = since
    if not changed:
        return None, is_alert
    lost = max(now[it] - _usual(it, rows) for it in changed)
    began_ns, noticed_ns = min(changed.values()), recent[-1][1]
    return Suspicion(pid, began_ns, noticed_ns, tuple(changed), lost, ticks[0][0]), True


def _usual(series: Series, rows: Iterable[dict[Series, float]]) -> float:
    return statistics.median(row[series] for row in rows)


def _rise(
    series: Series,
    rows: list[dict[Series, float]],
    recent: list[tuple[int, int, dict[Series, float]]],
    least: float,
    spread: float,
) -> int | None:
    """When the first tick began in which the series is out of the ordinary; 0: the last tick alone
    is, not far enough; None: it is not. `least`, `spread`: as in `risen`."""
    if recent[-1][2][series] <= least:  # most end here
        return None
    now = [row[series] for _, _, row in recent]
    ticks = _risen([row[series] for row in rows], now, least, spread)
    return None if ticks is None else recent[-ticks][0] if ticks else 0


def risen(
    before: Sequence[float],
    recent: Sequence[float],
    least: float,
    spread: float,
    most: float = LARGE,
) -> int:
    """How many of the recent values are out of the ordinary: all, 1 (the last one, where it is far
    out), or 0. `least`: a smaller rise is not worth reporting; `spread`: the least deviation that
    is assumed; `most`: a rise that counts however much the series varied."""
    return _risen(before, recent, least, spread, most) or 0


def _risen(
    before: Sequence[float],
    recent: Sequence[float],
    least: float,
    spread: float,
    most: float = LARGE,
) -> int | None:
    """As `risen`; None where the last value is not out of the ordinary at all."""
    usual = statistics.median(before)
    rise = recent[-1] - usual
    if rise <= least:
        return None
    deviation = NORMAL * statistics.median(abs(value - usual) for value in before)
    counts = max(least, min(most, DEVIATIONS * max(spread, deviation)))
    if rise <= counts:
        return None
    if all(value - usual > counts for value in recent):
        return len(recent)
    return 1 if rise > FAR_OUT * counts else 0


def _slower(
    rows: list[dict[Series, float]],
    recent: list[tuple[int, int, dict[Series, float]]],
    cpu: float,
    pace: float,
) -> bool:
    """Whether less was done in the last ticks, by the pace or by CPU time. `cpu`, `pace`: the
    usual."""
    return any(
        _fell(series, rows, recent, usual, least)
        for series, usual, least in ((Series.PACE, pace, LEAST_PACE), (Series.CPU, cpu, LEAST_CPU))
    )


def _works_on(recent: list[tuple[int, int, dict[Series, float]]], cpu: float) -> bool:
    """Whether the process uses its CPUs as before (`cpu`): threads with less to do wait for locks,
    too."""
    return statistics.fmean(row[Series.CPU] for _, _, row in recent) > WORKS_ON * cpu


def _fell(
    series: Series,
    rows: list[dict[Series, float]],
    recent: list[tuple[int, int, dict[Series, float]]],
    usual: float,
    least: float,
) -> bool:
    """Whether a series fell by as much as a slowdown (`PACE_FALL`), where it is steady enough."""
    if usual < least:
        return False
    deviation = NORMAL * statistics.median(abs(row[series] - usual) for row in rows)
    if deviation > STEADY_PACE * usual:
        return False
    now = statistics.fmean(row[series] for _, _, row in recent)
    return usual - now > max(PACE_FALL * usual, 2.5 * deviation)
