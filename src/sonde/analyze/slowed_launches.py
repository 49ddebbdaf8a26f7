# SPDX-License-Identifier: Apache-2.0
"""Launches of a thread that others keep from running: how much of them is the thread's own.

A thread that gets a CPU or a lock back goes on with cold caches, so contention takes more time than
its waits, and the rest of it shows as time on the launch path. How much is in no stack. So of two
parts that are about as large, the waits are the least that the contention costs, and the launch
path's time the most that launches cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sonde.analyze.ranking import CO_DOMINANT_FRACTION
from sonde.model.causes import Bound, Cause
from sonde.model.verdict import CauseShare

HAND_OVER_NS = 500_000
"""The most that a thread loses behind one wait, until its caches are warm."""
_CONTENDED = (Bound.LOCK, Bound.CPU_CONTENTION)


def without_hand_overs(
    causes: Sequence[CauseShare], counts: Mapping[Cause, int], window: int
) -> list[CauseShare]:
    """The causes with launches that are larger than a contention beside them, and about as large,
    cut to its size; what is beyond is not known, as far as hand-overs can explain it.

    Only where it is known who had the CPU or the lock. `counts`: waits by cause; `window`: the time
    that shares are of, in ns.
    """
    launch = next((one for one in causes if one.key == Cause.LAUNCH), None)
    if launch is None:
        return list(causes)
    left = launch.share
    for bound in _CONTENDED:
        waits = [one for one in causes if one.bound == bound]
        share = sum(one.share for one in waits)
        if share >= CO_DOMINANT_FRACTION * launch.share and any(one.facts for one in waits):
            most = sum(counts[one.key] for one in waits) * HAND_OVER_NS / window
            # Of two that are as large, the one that is known to be lost comes first.
            left = min(left, max(share - 1 / window, launch.share - most))
    slowed = launch.share - left
    if slowed <= 0:
        return list(causes)
    moved = round(slowed * window)
    rest = [one for one in causes if one.key not in (Cause.LAUNCH, Cause.UNKNOWN)]
    unknown = next((one for one in causes if one.key == Cause.UNKNOWN), None)
    unknown = unknown or CauseShare.empty(Cause.UNKNOWN, launch.thread)
    text = "on the launch path, which waits that others caused may have slowed"
    more = f"{100 * slowed:.0f} points of it {text}"
    found = [
        *rest,
        replace(launch, ns=launch.ns - moved, share=left),
        replace(unknown, ns=unknown.ns + moved, share=unknown.share + slowed,
                facts=[*unknown.facts, more]),
    ]  # fmt: skip
    return sorted(found, key=lambda one: -one.ns)
