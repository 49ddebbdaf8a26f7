# SPDX-License-Identifier: Apache-2.0
"""Waits for another process's answer: it works only when it is asked, and nothing is made ahead."""

from __future__ import annotations

from sonde.analyze.ranking import LEAST_SHARE
from sonde.model.timeline import Timeline


def is_round_trip(timeline: Timeline, track: int, waker: int) -> bool:
    """Whether a thread asks one of another process, and waits for the answer.

    Who fills a pipe or a socket ahead works while its reader does. Who answers waits for the next
    request all the time that the other does not wait for the answer: both waits fill the record.
    `track`: the thread that waits; `waker`: the one that ends its waits.
    """
    asked = timeline.ended_ns.get((waker, track), 0)
    if asked < LEAST_SHARE * (timeline.end_ns - timeline.start_ns):
        return False
    other = timeline.tracks[waker].pid
    answered = sum(
        ns
        for (mine, one), ns in timeline.ended_ns.items()
        if mine == track and timeline.tracks[one].pid == other
    )
    return asked + answered >= (1 - LEAST_SHARE) * (timeline.end_ns - timeline.start_ns)
