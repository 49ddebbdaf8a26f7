# SPDX-License-Identifier: Apache-2.0
"""Threads of the program that ask others only when they are asked themselves: a pool that fetches
what a step needs. Who waits for them waits for those others' answers; nothing is made ahead, so it
is no input."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from sonde.analyze.far_ends import far_end, label_of
from sonde.analyze.ranking import LEAST_SHARE
from sonde.model.timeline import ThreadOwner, Timeline, Total, TotalKind, WaitDetail
from sonde.model.verdict import Culprit

ASKS = 0.5
"""Of what a thread does but for its waits to be asked: for answers of others, by sockets."""
SOCKETS = ("socket", "poll")
"""Reasons of such waits."""


def mark_answers(timeline: Timeline, by_track: dict[int, list[Total]]) -> None:
    """Marks waits for threads that do little but ask others meanwhile (`WaitDetail.ANSWER`).

    A thread that works ahead works while the others do. One that is asked waits for the next
    question all the time in which nobody waits for its answer: both waits fill the record.
    """
    window = timeline.end_ns - timeline.start_ns
    idle_ns: dict[int, int] = {}  # for how long each thread waits to be asked; 0: it does not
    for track, totals in by_track.items():
        awaited = [one for one in totals if _is_for_another(timeline, one)]
        length = sum(one.ns for one in awaited)
        if length < LEAST_SHARE * window:
            continue
        for one in awaited:
            if one.waker_track not in idle_ns:
                idle_ns[one.waker_track] = _waits_to_be_asked(by_track.get(one.waker_track, ()))
        least = (1 - LEAST_SHARE) * window - length
        by_track[track] = [
            replace(one, wait_detail=WaitDetail.ANSWER)
            if _is_for_another(timeline, one) and idle_ns[one.waker_track] >= max(1.0, least)
            else one
            for one in totals
        ]


def asked(timeline: Timeline, answers: Mapping[int, int]) -> tuple[str, Culprit]:
    """(who asks for what is waited for, where, and whom, in words; the one that is waited for
    longest). `answers`: how long each such thread (by its track) was waited for; not empty."""
    most = timeline.tracks[max(answers, key=lambda track: answers[track])].label
    waits = [one for one in timeline.totals if one.track in answers and _is_on_socket(one)]
    places: dict[str, int] = defaultdict(int)
    for one in waits:
        places[one.location] += one.ns
    place = max(places, key=lambda it: places[it], default="")
    several = f"{len(answers)} threads, most of it {most}"
    text = f"it is answered through {several if len(answers) > 1 else most}"
    text += f", mostly waiting in {place}" * bool(place)
    if end := far_end(timeline, waits):
        text += f" for {label_of(end[0])}"
    return text, Culprit(most, place, waits[0].name if waits else "", asks=True)


def _is_on_socket(one: Total) -> bool:
    return one.kind == TotalKind.BLOCKED and one.name in SOCKETS and not one.serves


def _is_handed_over(one: Total) -> bool:
    is_wait = one.kind == TotalKind.BLOCKED and one.name == "futex"
    return is_wait and (one.serves or one.wait_detail == WaitDetail.QUEUE)


def _is_for_another(timeline: Timeline, one: Total) -> bool:
    """Whether a thread of the same program hands over what this wait is for."""
    if one.serves or not _is_handed_over(one) or one.waker_track in (-1, one.track):
        return False
    other = timeline.tracks[one.waker_track]
    is_same = other.pid == timeline.tracks[one.track].pid
    return is_same and other.owner == ThreadOwner.PROGRAM and 2 * one.waker_ns >= one.ns


def _waits_to_be_asked(totals: Iterable[Total]) -> int:
    """How long a thread waits to be asked, if it mostly asks others when it is."""
    sums: dict[str, int] = defaultdict(int)
    for one in totals:
        if one.kind in (TotalKind.BLOCKED, TotalKind.SAMPLED, TotalKind.RUNQUEUE):
            kind = "asks" if _is_on_socket(one) else "other"
            sums["idle" if _is_handed_over(one) else kind] += one.ns
    is_asking = sums["asks"] > 0 and sums["asks"] >= ASKS * (sums["asks"] + sums["other"])
    return sums["idle"] if is_asking else 0
