# SPDX-License-Identifier: Apache-2.0
"""The period of the work, from what threads asked of the device; no instrumentation.

The sequence is that of launches, copies and waits for the device, runs of the same one drawn
together. A step begins with an operation (the anchor) that each step has once. Any operation cuts
the sequence into pieces, and so do the long stalls; for a true anchor nearly all pieces hold the
same operations, whatever their timing, and most of the device's work. Layers repeat within a step,
steps within an epoch, so several cuts qualify: the shortest whose pieces take something in or out
(a copy from or to the host, a wait for the device) is the step; where none does, the longest whose
pieces still repeat often. Where the same request is all there is, each is a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sonde.analyze.idle import Stalls
from sonde.analyze.intervals import Coverage
from sonde.model.timeline import I64, CallKind, DeviceKind, Mask, Timeline, Way
from sonde.model.verdict import StepTable

LEAST = 4
"""Fewer pieces are no period."""
REGULAR = 0.7
"""Share of the operations that must lie in pieces like the usual one."""
WORK = 0.5
"""Share of the device's work that must."""
CANDIDATES = 256
LONG_NS = 100_000
"""A stall that may part steps."""
_LOOSE = 0.15


@dataclass(frozen=True, slots=True)
class _Sequence:
    """What the device was asked for, in order."""

    token: I64
    """Equal for equal requests."""
    start: I64
    """When the device began with it, or with the next one."""
    work: I64
    """How long it took the device."""
    operations: I64
    """How many."""
    exchange: Mask
    """With the host."""
    name: I64
    """Index into the timeline's names."""

    def __len__(self) -> int:
        return len(self.token)


@dataclass(frozen=True, slots=True)
class _Cut:
    """The sequence cut into pieces."""

    name: int
    at: I64
    """When pieces begin, and when the last one ends."""
    like: Mask
    """Which pieces are like the usual one."""
    operations: int
    covered: float
    exchanges: bool


def steps_of(timeline: Timeline, stalls: Stalls) -> StepTable | None:
    """The steps of a device; None where nothing repeats."""
    single = _sequence(timeline, stalls)
    if len(single) < 2 * LEAST:
        return None
    drawn = _runs(single)
    cut = _choose([*_cuts(drawn), *_at_stalls(stalls, single)]) or _same(single)
    if cut is None:
        return None
    begin, end = cut.at[:-1], cut.at[1:]
    duration = end - begin
    computing = Coverage(stalls.computing).within(begin, end)
    low, median, high = (int(np.percentile(duration[cut.like], p)) for p in (10, 50, 90))
    return StepTable(
        count=len(begin),
        median_ns=median,
        p10_ns=low,
        p90_ns=high,
        operations=cut.operations,
        regularity=float(cut.like.mean()),
        anchor=timeline.names[cut.name],
        start_ns=begin.tolist(),
        duration_ns=duration.tolist(),
        computing_ns=computing.tolist(),
        like=cut.like.tolist(),
    )


def _sequence(timeline: Timeline, stalls: Stalls) -> _Sequence:
    events, calls = stalls.events, timeline.calls
    known = np.flatnonzero(events.correlation)
    if len(known) < 0.5 * len(events) or not len(calls):
        return _of_device(stalls)
    ids, first, inverse = np.unique(
        events.correlation[known], return_index=True, return_inverse=True
    )
    work = np.bincount(inverse, events.duration_ns[known], len(ids)).astype(np.int64)
    number = np.bincount(inverse, minlength=len(ids))
    at = np.minimum(np.searchsorted(ids, calls.correlation), len(ids) - 1)
    asks = (ids[at] == calls.correlation) & (calls.correlation != 0)
    launching = np.unique(calls.lane[asks])
    waits = (calls.kind == CallKind.SYNC) & np.isin(calls.lane, launching) & ~asks
    rows = np.flatnonzero(asks | waits)
    if not len(rows):
        return _of_device(stalls)
    asked = asks[rows]
    op = known[first[at[rows]]]
    count = np.where(asked, number[at[rows]], 0)
    name = np.where(asked, events.name[op], calls.name[rows]).astype(np.int64)
    start = np.where(asked, events.start_ns[op], np.iinfo(np.int64).max)
    start = np.minimum.accumulate(start[::-1])[::-1]
    start = np.where(start == np.iinfo(np.int64).max, events.end_ns.max(), start)
    copied = (events.kind[op] == DeviceKind.COPY) & np.isin(events.way[op], (Way.H2D, Way.D2H))
    return _Sequence(
        token=(name << 24) ^ (np.minimum(count, 1 << 20) << 1) ^ ~asked,
        start=np.maximum.accumulate(start),
        work=np.where(asked, work[at[rows]], 0),
        operations=count,
        exchange=~asked | copied,
        name=name,
    )


def _of_device(stalls: Stalls) -> _Sequence:
    """What the device ran, where nothing tells who asked for it."""
    events = stalls.events
    name = events.name.astype(np.int64)
    copied = (events.kind == DeviceKind.COPY) & np.isin(events.way, (Way.H2D, Way.D2H))
    return _Sequence(
        name << 24,
        events.start_ns,
        events.duration_ns,
        np.ones(len(events), np.int64),
        copied,
        name,
    )


def _runs(single: _Sequence) -> _Sequence:
    """The sequence with runs of equal requests as one request."""
    first = np.ones(len(single), bool)
    first[1:] = single.token[1:] != single.token[:-1]
    rows = np.flatnonzero(first)
    length = np.diff(np.append(rows, len(single)))
    return _Sequence(
        token=(single.token[rows] * 1_000_003) ^ length,
        start=single.start[rows],
        work=np.add.reduceat(single.work, rows),
        operations=np.add.reduceat(single.operations, rows),
        exchange=single.exchange[rows],
        name=single.name[rows],
    )


def _cuts(sequence: _Sequence) -> list[_Cut]:
    """One cut for each number of times that some request occurs."""
    _, first, inverse, counts = np.unique(
        sequence.token, return_index=True, return_inverse=True, return_counts=True
    )
    enough = np.flatnonzero(counts > LEAST)
    sums = _sums(inverse)
    cuts = []
    for count in np.unique(counts[enough])[:CANDIDATES].tolist():
        alike = enough[counts[enough] == count]
        for kind in alike[np.argsort(first[alike])][:3].tolist():
            cut = _cut(sequence, np.flatnonzero(inverse == kind), sums)
            if cut is not None:
                cuts.append(cut)
                break
    return cuts


def _at_stalls(stalls: Stalls, sequence: _Sequence) -> list[_Cut]:
    """The cut at what follows each long stall, where that is regular."""
    duration = stalls.duration_ns
    long = duration >= LONG_NS
    if long.sum() <= LEAST:
        return []
    long &= duration >= 0.5 * np.percentile(duration[long], 75)
    at = np.unique(np.searchsorted(sequence.start, stalls.end[long], "left"))
    at = at[at < len(sequence)]
    if len(at) <= LEAST:
        return []
    inverse = np.unique(sequence.token, return_inverse=True)[1]
    cut = _cut(sequence, at, _sums(inverse))
    return [replace(cut, exchanges=True)] if cut is not None and cut.covered >= 0.9 else []


def _same(single: _Sequence) -> _Cut | None:
    """Each request by itself, where nearly all are the same."""
    _, inverse, counts = np.unique(single.token, return_inverse=True, return_counts=True)
    if counts.max() < 0.9 * len(single):
        return None
    at = np.flatnonzero(inverse == int(counts.argmax()))
    return _cut(single, at, _sums(inverse))


def _sums(token: I64) -> I64:
    """Running sums of random codes: pieces of equal sums hold the same requests."""
    codes = np.random.default_rng(1).integers(1, 1 << 62, int(token.max()) + 1)
    return np.concatenate([[0], np.cumsum(codes[token])])  # wraps around, as a hash may


def _cut(sequence: _Sequence, at: I64, sums: I64) -> _Cut | None:
    length = np.diff(at)
    inner = int(length.sum())
    if inner < 0.5 * len(sequence):
        return None  # what lies outside of all pieces is no small rest
    value = sums[at[1:]] - sums[at[:-1]]
    inverse = np.unique(value, return_inverse=True)[1]
    like: Mask = inverse == int(np.bincount(inverse, length).argmax())
    covered = float(length[like].sum()) / inner
    if covered < REGULAR:
        # Shapes may differ from step to step; then their number must be about the same.
        middle = float(np.median(length))
        like = np.abs(length - middle) <= _LOOSE * middle
        covered = 0.99 * float(length[like].sum()) / inner if middle >= 8 else 0.0
    work = np.add.reduceat(sequence.work, at)[:-1]
    whole = int(sequence.work.sum())
    if covered < REGULAR or like.sum() < LEAST or work[like].sum() < WORK * whole:
        return None
    exchanges = np.add.reduceat(sequence.exchange.astype(np.int64), at)[:-1]
    operations = np.add.reduceat(sequence.operations, at)[:-1]
    return _Cut(
        name=int(sequence.name[at[0]]),
        at=sequence.start[at],
        like=like,
        operations=int(np.median(operations[like])),
        covered=covered,
        exchanges=bool((exchanges[like] > 0).mean() > 0.8),
    )


def _choose(cuts: list[_Cut]) -> _Cut | None:
    if not cuts:
        return None
    exchanging = [cut for cut in cuts if cut.exchanges]
    if exchanging:
        return min(exchanging, key=lambda cut: (cut.operations, -cut.covered))
    often = [cut for cut in cuts if len(cut.at) > 2 * LEAST] or cuts
    return max(often, key=lambda cut: (cut.covered >= 0.9, cut.operations))
