# SPDX-License-Identifier: Apache-2.0
"""Pools that threads which answer requests wait for: of connections, of buffers, a semaphore.

No name decides. A queue from which one thread takes what another one made goes one way; threads
that take from a pool give back what they took, so they end one another's waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.timeline import Mask, Pool, Total, TotalKind, WaitDetail
from sonde.query.columns import Frames, int64_column

MAX_POOLS = 8
"""Functions that wait for pools that are looked at: those with the longest waits."""
MAX_CALLERS = 8
"""Functions that take from a pool through one function."""
GIVEN_BACK = 0.5
"""Of the waits in a function, that threads which take from the same pool ended."""
LEAST_GIVERS = 2
"""Threads that ended such waits: one alone may be who makes what the others wait for."""
ONLY_WAITS = 0.9
"""Of the time for which a function is blocked, on futexes: it takes from the pool for the one that
calls it, and does nothing else."""


def with_pools(
    frames: Frames, sample: pa.Table, totals: Sequence[Total]
) -> tuple[list[Total], list[Pool]]:
    """(the totals, those of waits for a pool with that detail; the pools)."""
    waits: dict[str, list[Total]] = defaultdict(list)
    entries: dict[int, set[tuple[str, str]]] = defaultdict(set)
    for one in totals:
        if one.service and not one.serves:
            entries[one.track].add((one.service, one.entry))
        if _may_be_for_a_pool(one):
            waits[_function(one.location)].append(one)
    found = []
    ranked = sorted(waits, key=lambda function: -sum(one.ns for one in waits[function]))
    for function in ranked[:MAX_POOLS]:
        tracks = {one.track for one in waits[function]}
        if _is_pool(waits[function], tracks, entries):
            found.append(Pool(function, frozenset(tracks), _places(frames, sample, function)))
    functions = {one.function for one in found}
    return [
        replace(one, wait_detail=WaitDetail.POOL)
        if _may_be_for_a_pool(one) and _function(one.location) in functions
        else one
        for one in totals
    ], found


def _may_be_for_a_pool(one: Total) -> bool:
    is_wait = one.kind == TotalKind.BLOCKED and one.name == "futex" and not one.serves
    return is_wait and one.wait_detail == WaitDetail.QUEUE and bool(one.location)


def _is_pool(
    waits: Iterable[Total], tracks: set[int], entries: dict[int, set[tuple[str, str]]]
) -> bool:
    """Whether requests wait so, and mostly threads that wait so, too, or answer such requests ended
    these waits."""
    requests = {(one.service, one.entry) for one in waits if one.service}
    ended: dict[bool, int] = defaultdict(int)
    givers = set()
    for one in waits:
        other = one.waker_track
        if other >= 0 and other != one.track:
            takes_too = other in tracks or not requests.isdisjoint(entries.get(other, ()))
            ended[takes_too] += one.waker_ns
            givers |= {other} if takes_too else set()
    is_mostly = ended[True] >= GIVEN_BACK * sum(ended.values())
    return bool(requests) and is_mostly and len(givers) >= LEAST_GIVERS


def _places(frames: Frames, sample: pa.Table, function: str) -> frozenset[str]:
    """The locations of which most of the time is in functions that take from the pool for which
    threads wait in `function`."""
    roles, row = frames.roles, frames.row_of(sample.column("stack_id"))
    ns = int64_column(sample, "weight_ns")
    location = roles.location[row].astype(np.int64) + 1
    in_function = [1 + at for at, text in enumerate(roles.locations) if _function(text) == function]
    innermost: Mask = np.isin(location, in_function)
    all_ns = np.bincount(location, ns, len(roles.locations) + 1)
    blocked = np.asarray(pc.equal(sample.column("kind"), "blocked"), bool) & innermost
    futex = np.asarray(pc.equal(sample.column("name"), "futex"), bool) & blocked
    only_waits = float(ns[futex].sum()) >= ONLY_WAITS * float(ns[blocked].sum())
    callers = np.bincount(roles.caller[row][innermost] + 1, ns[innermost])
    takers = [_function(roles.locations[at - 1])
              for at in np.argsort(-callers)[:MAX_CALLERS].tolist() if at and callers[at]]  # fmt: skip
    inside = np.zeros(len(row), bool)
    if only_waits and takers:
        for taker in dict.fromkeys(takers):
            inside |= frames.within(taker)[row]
        inside &= ~frames.within(function)[row]
    else:
        inside |= frames.within(function)[row]
    inside_ns = np.bincount(location[inside], ns[inside], len(all_ns))
    most = np.flatnonzero(2 * inside_ns > all_ns).tolist()
    return frozenset(roles.locations[one - 1] for one in most if one)


def _function(location: str) -> str:
    """A location without its line."""
    function, _, line = location.rpartition(":")
    return function if function and line.isdecimal() else location
