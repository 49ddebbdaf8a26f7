# SPDX-License-Identifier: Apache-2.0
"""What threads do while they hold a lock that others wait for.

A recording shows who ended a wait, and where every thread spends its time; when a lock is taken and
given back it does not show. So the code within the function that takes the lock stands for what it
is held for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from sonde.analyze.ranking import LEAST_SHARE
from sonde.model.timeline import Timeline, Total, TotalKind, WaitDetail
from sonde.model.user_code import function_of
from sonde.model.verdict import WITHOUT_CPU, Culprit

PARTS = 3
"""What a holder does, at most: most of the time first."""
NAMES = 2
"""Functions that take the lock that are named."""
LEAST_PART = 0.1
"""Smaller parts of what holders do are left out, and places where threads hardly wait."""

_ON_CPU = "on a CPU"
_READY = "ready, without a CPU"
_OWN = WaitDetail.OWN_LOCK
_WAITS_FOR_OTHERS = (_OWN, WaitDetail.QUEUE, WaitDetail.POOL)


def held_for(
    timeline: Timeline, places: Mapping[str, int], waiting: Collection[int], holder: int
) -> tuple[list[str], Culprit | None]:
    """(a line on what a lock is held for, whose code that is); none where that is not known.

    `places`: for how long threads wait for it, by place, in ns; `waiting`: the tracks of these
    threads; `holder`: the track of the thread that holds it, -1 where those that wait pass it on.
    """
    if holder >= 0:
        mine = [one for one in timeline.totals if one.track == holder]
        takes = {function_of(one.location) for one in mine if one.wait_detail == _OWN}
        inside = _inside(timeline, takes)
        known = [one for one in mine if one.location in inside]
        label = timeline.tracks[holder].label
        if {doing_of(one) for one in known} <= {"", _ON_CPU}:
            return [], None  # who holds it is named with the code that it runs
        text, culprit = _parts(timeline, known, label)
        return ([f"held for {text}"], culprit) if text else ([], None)
    least = LEAST_PART * sum(places.values())
    takes = {function_of(place) for place, ns in places.items() if place and ns >= least}
    inside = _inside(timeline, takes)
    theirs = [one for one in timeline.totals if one.track in waiting and one.location in inside]
    text, culprit = _parts(timeline, theirs, "")
    names = ", ".join(sorted(one.rpartition(" ")[0] or one for one in takes)[:NAMES])
    if not text:
        return [], None
    line = f"these threads pass it on, and in {names} hold it for {text}"
    return [line], culprit


def _inside(timeline: Timeline, functions: Iterable[str]) -> set[str]:
    """The locations within any of these functions."""
    return set[str]().union(*(timeline.within.get(function, ()) for function in functions))


def _parts(timeline: Timeline, totals: Iterable[Total], thread: str) -> tuple[str, Culprit | None]:
    """(what these totals are of, with shares of the record, '' where they are short; the place with
    most of the time, and what is done there). `thread`: whose they are, as in `Culprit`.

    Time without a CPU is what somebody else does: the next step is about what is done besides.
    """
    ns: dict[str, int] = defaultdict(int)
    places: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for one in totals:
        if doing := doing_of(one):
            ns[doing] += one.ns
            places[doing][one.location] += one.ns
    whole = sum(ns.values())
    window = max(1, timeline.end_ns - timeline.start_ns)
    if whole < LEAST_SHARE * window:
        return "", None
    ranked = sorted(ns, key=lambda doing: -ns[doing])
    done = next((one for one in ranked if one != _READY), WITHOUT_CPU)
    most = places[_READY if done == WITHOUT_CPU else done]
    place = max(most, key=lambda place: most[place])
    culprit = Culprit(thread, place, done, is_short_of_cpu=ranked[0] == _READY)
    ranked = [one for one in ranked[:PARTS] if ns[one] >= LEAST_PART * whole]
    where = [_at(timeline, places[one]) for one in ranked]
    shown = [f"{one} ({100 * ns[one] / window:.0f} % of the time)" for one in ranked]
    if len(set(where)) == 1:
        return f"{', '.join(shown)}{where[0]}", culprit
    return ", ".join(one + place for one, place in zip(shown, where, strict=True)), culprit


def doing_of(one: Total) -> str:
    """What a thread does that holds a lock; '' where it waits for one, or for work."""
    if one.kind == TotalKind.SAMPLED:
        return _ON_CPU
    if one.kind == TotalKind.RUNQUEUE:
        return _READY
    if one.kind != TotalKind.BLOCKED or one.wait_detail in _WAITS_FOR_OTHERS:
        return ""
    return "waiting for the interpreter lock" if one.wait_detail == WaitDetail.GIL else one.name


def _at(timeline: Timeline, places: Mapping[str, int]) -> str:
    """' in append store.py:8 ← write store.py:13': the place with most of the time."""
    place = max(places, key=lambda one: places[one])
    if not place:
        return ""
    caller = timeline.callers.get(place, "")
    return f" in {place} ← {caller}" if caller else f" in {place}"
