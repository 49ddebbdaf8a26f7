# SPDX-License-Identifier: Apache-2.0
"""Totals of threads of which only single waits or samples are known, as other profilers record
them."""

from __future__ import annotations

import numpy as np

from sonde.model.distinct_rows import distinct_rows
from sonde.model.timeline import (
    Activity,
    CallKind,
    StateKind,
    Timeline,
    Total,
    TotalKind,
    WaitDetail,
)


def add_single_rows(timeline: Timeline, by_track: dict[int, list[Total]]) -> None:
    """Adds totals of waits, and of time on a CPU, of threads that have none in `by_track`."""
    _add_states(timeline, by_track)
    _add_samples(timeline, by_track)


def _add_states(timeline: Timeline, by_track: dict[int, list[Total]]) -> None:
    """Adds single waits of threads without totals of waits."""
    waits = (TotalKind.BLOCKED, TotalKind.RUNQUEUE)
    known = {track for track, all_of in by_track.items() for one in all_of if one.kind in waits}
    states = timeline.states
    for track in np.unique(states.track).tolist() if len(states) else []:
        if track in known or not timeline.is_chosen(track):
            continue
        mine = states.take(states.track == track)
        columns = (mine.kind, mine.name, mine.wait_detail, mine.waker, mine.duration_ns)
        for kind, name, detail, waker, ns in zip(*(c.tolist() for c in columns), strict=True):
            total = Total(
                track,
                TotalKind.BLOCKED if kind == StateKind.BLOCKED else TotalKind.RUNQUEUE,
                timeline.names[name],
                CallKind.OTHER,
                ns,
                1,
                waker_ns=ns if waker else 0,
                waker_track=waker - 1,
                wait_detail=WaitDetail(detail),
            )
            by_track[track].append(total)


def _add_samples(timeline: Timeline, by_track: dict[int, list[Total]]) -> None:
    """Adds on-CPU samples of threads without totals of them, as other profilers record them."""
    samples = timeline.samples
    known = {t for t, all_of in by_track.items() for o in all_of if o.kind == TotalKind.SAMPLED}
    different, inverse = distinct_rows([samples.track, samples.name, samples.fault])
    ns = np.bincount(inverse, samples.weight_ns, len(different))
    count = np.bincount(inverse, minlength=len(different))
    for (track, name, fault), sum_ns, of in zip(
        different.tolist(), ns.tolist(), count.tolist(), strict=True
    ):
        if track in known or not timeline.is_chosen(track):
            continue
        doing = Activity.PAGE_FAULT if fault else Activity.CODE
        total = Total(
            track, TotalKind.SAMPLED, doing, CallKind.OTHER, round(sum_ns), 0,
            location=timeline.names[name], samples=of,
        )  # fmt: skip
        by_track[track].append(total)
