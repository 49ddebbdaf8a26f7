# SPDX-License-Identifier: Apache-2.0
"""Pools that threads which answer requests wait for: of connections, of buffers, a semaphore.

No name decides. A queue from which one thread takes what another one made goes one way; threads
that take from a pool give back what they took, so they end one another's waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.timeline import Mask, Pool, Total, TotalKind, WaitDetail
from sonde.query.columns import Frames, ThreadTracks, int64_column

MAX_FUNCTIONS = 16
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
    tracks: ThreadTracks,
    frames: Frames,
    sample: pa.Table,
    totals: Sequence[Total],
    pids: Sequence[int],
) -> tuple[list[Total], list[Pool]]:
    """(the totals, those of waits for a pool with that detail; the pools). `pids`: the process of
    each track; another process may have functions of the same names."""
    waits: dict[tuple[int, str], list[Total]] = defaultdict(list)
    entries: dict[int, set[tuple[str, str]]] = defaultdict(set)
    for one in totals:
        if one.service and not one.serves:
            entries[one.track].add((one.service, one.entry))
        if _may_be_for_a_pool(one):
            waits[pids[one.track], _function(one.location)].append(one)
    found = []
    ranked = sorted(waits, key=lambda key: -sum(one.ns for one in waits[key]))
    ranked = ranked[:MAX_FUNCTIONS]
    of_pools: set[tuple[int, str]] = set()
    for key in ranked:
        if key in of_pools or not _is_pool(waits[key], entries):
            continue
        mine = {key}
        mine |= {
            it for it in ranked if it[0] == key[0] and _takes_from(waits[it], waits[key], entries)
        }
        of_pools |= mine
        takers = frozenset(one.track for it in mine for one in waits[it])
        lines = {one.location for it in mine for one in waits[it]}
        rows = sample.filter(pc.equal(sample.column("pid"), key[0]))
        functions = frozenset(function for _, function in mine)
        places = _places(tracks, frames, rows, functions, lines)
        found.append(Pool(functions, takers, places))
    return [
        replace(one, wait_detail=WaitDetail.POOL)
        if _may_be_for_a_pool(one) and (pids[one.track], _function(one.location)) in of_pools
        else one
        for one in totals
    ], found


def _may_be_for_a_pool(one: Total) -> bool:
    is_wait = one.kind == TotalKind.BLOCKED and one.name == "futex" and not one.serves
    return is_wait and one.wait_detail == WaitDetail.QUEUE and bool(one.location)


def _is_pool(waits: Iterable[Total], entries: Mapping[int, set[tuple[str, str]]]) -> bool:
    """Whether requests wait so, and mostly threads that wait so, too, or answer such requests ended
    these waits."""
    requests = {(one.service, one.entry) for one in waits if one.service}
    share, givers = _given_back(waits, waits, entries)
    return bool(requests) and share >= GIVEN_BACK and givers >= LEAST_GIVERS


def _takes_from(
    waits: Sequence[Total], pool: Sequence[Total], entries: Mapping[int, set[tuple[str, str]]]
) -> bool:
    """Whether other waits are for the same pool: those that wait for it ended most of them, and the
    other way round some."""
    share, _ = _given_back(waits, pool, entries)
    takers = {one.track for one in waits}
    return share >= GIVEN_BACK and any(one.waker_track in takers for one in pool)


def _given_back(
    waits: Iterable[Total], pool: Iterable[Total], entries: Mapping[int, set[tuple[str, str]]]
) -> tuple[float, int]:
    """(the share of these waits that other threads ended which wait for a pool or answer requests
    that do, 0 where nobody is known; how many such threads)."""
    tracks = {one.track for one in pool}
    requests = {(one.service, one.entry) for one in pool if one.service}
    ended: dict[bool, int] = defaultdict(int)
    givers = set()
    for one in waits:
        other = one.waker_track
        if other >= 0 and other != one.track:
            takes_too = other in tracks or not requests.isdisjoint(entries.get(other, ()))
            ended[takes_too] += one.waker_ns
            givers |= {other} if takes_too else set()
    return ended[True] / max(1, sum(ended.values())), len(givers)


def _places(
    tracks: ThreadTracks,
    frames: Frames,
    sample: pa.Table,
    functions: Collection[str],
    lines: Collection[str],
) -> frozenset[tuple[int, str]]:
    """`Pool.places` of a pool that threads wait for in these functions, at these lines."""
    row, track = frames.row_of(sample.column("stack_id")), tracks.of_rows(sample)
    locations = frames.roles.locations
    location = frames.roles.location[row].astype(np.int64) + 1
    inside = np.zeros(len(row), bool)
    for function in functions:
        inside |= _taking(frames, sample, function)
    inside &= ~np.isin(location, [at for at, it in enumerate(locations, 1) if it in lines])
    keys = track.astype(np.int64) * (len(locations) + 1) + location
    different, of_row = np.unique(keys, return_inverse=True)
    ns = int64_column(sample, "weight_ns")
    mostly = np.bincount(of_row, ns * (2 * inside - 1), len(different)) > 0
    pairs = (divmod(key, len(locations) + 1) for key in different[mostly].tolist())
    return frozenset((one, locations[at - 1]) for one, at in pairs if at)


def _taking(frames: Frames, sample: pa.Table, function: str) -> Mask:
    """Which rows of `sample` are within a function that takes from a pool: this one, or those that
    call it where it does nothing but wait."""
    roles, row = frames.roles, frames.row_of(sample.column("stack_id"))
    ns = int64_column(sample, "weight_ns")
    locations = [at for at, text in enumerate(roles.locations) if _function(text) == function]
    innermost: Mask = np.isin(roles.location[row], locations)
    blocked = np.asarray(pc.equal(sample.column("kind"), "blocked"), bool) & innermost
    futex = np.asarray(pc.equal(sample.column("name"), "futex"), bool) & blocked
    inside = frames.within(function)[row]
    if float(ns[futex].sum()) >= ONLY_WAITS * float(ns[blocked].sum()):
        callers = np.bincount(roles.caller[row][innermost] + 1, ns[innermost])
        for at in np.argsort(-callers)[:MAX_CALLERS].tolist():
            if at and callers[at]:
                inside |= frames.within(_function(roles.locations[at - 1]))[row]
    return inside


def _function(location: str) -> str:
    """A location without its line."""
    function, _, line = location.rpartition(":")
    return function if function and line.isdecimal() else location
