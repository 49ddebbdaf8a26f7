# SPDX-License-Identifier: Apache-2.0
"""Who holds what a pool lends while requests wait for it.

When something is taken from a pool and given back is not recorded. What threads do in functions
that take from it (`Pool.places`) stands for what they hold it for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from sonde.analyze.lock_holders import doing_of
from sonde.analyze.ranking import LEAST_SHARE
from sonde.model.timeline import Timeline, TotalKind
from sonde.model.user_code import function_of
from sonde.model.verdict import Culprit

HOLDERS = 3
"""Groups of threads that hold what a pool lends and are named."""
LEAST_HELD = 0.1
"""Of what is held, for a group that is named."""
ANSWERED = 0.25
"""Of the time for which it is held, for the thread that ended the waits meanwhile."""


_Key = TypeVar("_Key")


@dataclass(slots=True)
class _Holders:
    """Threads that take from a pool in the same function of the program. Lengths in ns."""

    tracks: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """How long each has held something."""
    doing: dict[tuple[str, str, str], int] = field(default_factory=lambda: defaultdict(int))
    """By what was done meanwhile, where, and who called that."""
    ended: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """By the track of the thread that ended waits meanwhile."""

    @property
    def ns(self) -> int:
        return sum(self.tracks.values())


def held_from_pools(
    timeline: Timeline, places: Mapping[str, int], waiting: Collection[int]
) -> tuple[list[str], Culprit | None]:
    """(a line for each group of threads that holds what these pools lend, the most first; the first
    group's code); none where nobody is known.

    `places`: for how long requests wait, by place, in ns; `waiting`: the tracks that do.
    """
    functions, mine = {function_of(place) for place in places}, set(waiting)
    pools = [
        one
        for one in timeline.pools
        if not one.functions.isdisjoint(functions) and not one.tracks.isdisjoint(mine)
    ]
    inside = frozenset[tuple[int, str]]().union(*(one.places for one in pools))
    takers = frozenset[int]().union(*(one.tracks for one in pools))
    groups: dict[str, _Holders] = defaultdict(_Holders)
    for one in timeline.totals:
        key = one.track, one.location
        doing = doing_of(one) if key in inside and not one.serves else ""
        if not doing:
            continue
        caller = timeline.thread_callers.get(key) or timeline.callers.get(one.location, "")
        group = groups["" if one.track in mine else function_of(caller or one.location)]
        group.tracks[one.track] += one.ns
        group.doing[doing, one.location, caller] += one.ns
        if one.kind == TotalKind.BLOCKED and one.name != "futex" and one.waker_track >= 0:
            group.ended[one.waker_track] += one.waker_ns
    window = max(1, timeline.end_ns - timeline.start_ns)
    whole = sum(one.ns for one in groups.values())
    if whole < LEAST_SHARE * window:
        return [], None
    ranked = sorted(groups.items(), key=lambda item: -item[1].ns)
    lines = [
        _line(timeline, one, bool(which), window, takers)
        for which, one in ranked[:HOLDERS]
        if one.ns >= LEAST_HELD * whole
    ]
    which, first = ranked[0]
    doing, place = _where(first)
    return lines, Culprit(_named(timeline, first.tracks) if which else "", place, doing)


def _line(
    timeline: Timeline, one: _Holders, others: bool, window: int, takers: Collection[int]
) -> str:
    doing, place = _where(one)
    whose = _named(timeline, one.tracks) if others else "the requests themselves"
    return (
        f"{one.ns / window:.1f} of what it lends held by {whose}, on average: "
        f"mostly {doing} in {place}{_answer(timeline, one, takers)}"
    )


def _where(one: _Holders) -> tuple[str, str]:
    """(what they mostly do, in which place, with its caller)"""
    doing, code, caller = _most(one.doing)
    return doing, f"{code} ← {caller}" if caller else code


def _answer(timeline: Timeline, one: _Holders, takers: Collection[int]) -> str:
    """For whom the holders wait meanwhile, and what that one mostly does; '' not known."""
    ended = {track: ns for track, ns in one.ended.items() if track not in takers}
    if sum(ended.values()) < ANSWERED * one.ns:
        return ""
    most = _most(ended)
    doing: dict[tuple[str, str], int] = defaultdict(int)
    for total in timeline.totals:
        if total.track == most and not total.serves and (text := doing_of(total)):
            doing[text, total.location] += total.ns
    if not doing:
        return ""
    text, place = _most(doing)
    where = f" in {place}" if place else ""
    return f"; answered by {_named(timeline, ended)}: mostly {text}{where}"


def _named(timeline: Timeline, tracks: Mapping[int, int]) -> str:
    """'totals-0 (12) and 1 more': the one with most of the time first; hardly any time is none."""
    first = _most(tracks)
    more = _more(tracks.values())
    return timeline.tracks[first].label + (f" and {more:,} more" if more else "")


def _more(times: Iterable[int]) -> int:
    """How many threads beside the first have a good part of the time."""
    every = [*times]
    return sum(ns >= LEAST_HELD * max(every) for ns in every) - 1


def _most(times: Mapping[_Key, int]) -> _Key:
    return max(times, key=lambda key: times[key])
