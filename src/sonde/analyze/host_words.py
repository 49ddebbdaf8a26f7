# SPDX-License-Identifier: Apache-2.0
"""The words of a verdict on a thread of a program that calls no device: nothing is launched there,
and nothing is copied to a device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from sonde.analyze.causes import IO_REASONS
from sonde.analyze.ranking import LEAST_SHARE
from sonde.analyze.thread_time import cause_of
from sonde.model.causes import Cause, in_host_words
from sonde.model.timeline import Timeline, Total, TotalKind
from sonde.model.verdict import Verdict


def of_io(timeline: Timeline, totals: Iterable[Total], length: int) -> list[str]:
    """A line on what I/O threads wait for, the most first: a server's threads wait for the next
    request on a socket, and for a disk. `length`: of all of it, in ns, which may be cut to the time
    that there was; none where it is one."""
    ns: dict[str, int] = defaultdict(int)
    for one in totals:
        # What such a wait is for may be another cause: a queue's pipe, the next request.
        if one.name in IO_REASONS and one.kind == TotalKind.BLOCKED:
            ns[one.name] += one.ns if cause_of(timeline, one) == Cause.IO else 0
    whole = max(length, sum(ns.values()))
    ranked = sorted(filter(ns.get, ns), key=lambda reason: -ns[reason])
    large = [reason for reason in ranked if ns[reason] >= LEAST_SHARE * whole]
    if len(ranked) < 2 or not large:
        return []
    return ["of it " + ", ".join(f"{one} {100 * ns[one] / whole:.0f} %" for one in large)]


def without_device(verdict: Verdict, threads: int = 1) -> Verdict:
    """The same verdict without words that are about a device or a thread that launches. `threads`:
    how many it is about."""
    text = in_host_words
    return replace(
        verdict,
        computing=0.0,
        without_device=True,
        threads=threads,
        causes=[
            replace(one, title=text(one.title), facts=[text(fact) for fact in one.facts])
            for one in verdict.causes
        ],
        evidence=[text(line) for line in verdict.evidence],
        advice=[replace(one, text=text(one.text)) for one in verdict.advice],
    )
