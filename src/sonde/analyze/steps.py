# SPDX-License-Identifier: Apache-2.0
"""Finds the repeating steps of the work from the requests to the device, without instrumentation.

The sequence consists of launches, copies and waits for the device; runs of equal requests count as
one. A step begins with an operation (the anchor) that each step has once. Any operation cuts the
sequence into pieces, and so do long stalls. For a true anchor nearly all pieces hold the same
operations, whatever their timing, and most of the device's work. Layers repeat within a step, and
steps within an epoch, so several cuts qualify. The step is the shortest whose pieces exchange data
with the host (a copy from or to it, a wait for the device). Without such a cut, the requests cannot
distinguish a step from a loop within it; then the program's own calls do, if they are known
(`sonde.analyze.loops`), else the step is the longest cut that still repeats often. If all requests
are equal, each is a step.

Steps follow one another. If pieces of an operation alternate (two matrix products in a step, the
second followed by the copy of the next batch), a step is a typical piece and those up to the next
typical one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sonde.analyze import loops
from sonde.analyze.intervals import Coverage
from sonde.analyze.stalls import Stalls
from sonde.model.timeline import (
    I32,
    I64,
    CallKind,
    CopyDirection,
    DeviceKind,
    Mask,
    Timeline,
    is_one_of,
)
from sonde.model.verdict import StepTable

LEAST = 4
"""Fewer pieces do not show a period."""
REGULAR = 0.7
"""Share of the requests that must lie in pieces like the typical one."""
WORK = 0.5
"""Share of the device's work that must lie in them."""
CHAIN = 0.5
"""Share of the typical pieces that another typical one must follow."""
MOST = 0.75
"""Share of the work that pieces must hold to be steps: a loop within the step holds less."""
WHOLE = 0.9
"""Share of the requests and of the work that calls of the program must hold to be steps."""
CANDIDATES = 256
"""At most this many frequencies of requests are tried, the lowest first."""
LONG_NS = 100_000
"""A stall of this length may separate steps."""
_LOOSE = 0.15
"""Pieces whose numbers of operations differ by less are alike, where shapes vary."""


@dataclass(frozen=True, slots=True)
class _Sequence:
    """The requests to the device, in order."""

    token: I64
    """Equal for equal requests."""
    start: I64
    """When the device began with the request, or with the next one."""
    work: I64
    """Device time, in ns."""
    operations: I32
    """Number of device operations."""
    exchange: Mask
    """Whether the request exchanges data with the host."""
    name: I32
    """Index into the timeline's names."""
    asked: I64
    """When a thread made the request; empty where unknown."""
    called: bool = False
    """Whether the entries are calls of the program, not single requests."""

    def __len__(self) -> int:
        return len(self.token)

    def grouped(self, first: I64, token: I64, name: I32, called: bool = False) -> _Sequence:
        """The sequence with all requests from each of `first` up to the next as one request."""
        if len(first) == len(self):  # nothing to group, and there are millions
            return replace(self, token=token, name=name, called=called)
        return _Sequence(
            token=token,
            start=self.start[first],
            work=np.add.reduceat(self.work, first),
            operations=np.add.reduceat(self.operations, first),
            exchange=np.logical_or.reduceat(self.exchange, first),
            name=name,
            asked=self.asked[first] if len(self.asked) else self.asked,
            called=called,
        )


@dataclass(frozen=True, slots=True)
class _Cut:
    """The sequence cut into pieces."""

    name: int
    """The anchor, an index into the timeline's names."""
    at: I64
    """When pieces begin, and when the last one ends."""
    like: Mask
    """Whether each piece is like the typical one."""
    operations: int
    """Device operations of a typical piece."""
    covered: float
    """Share of the requests in pieces like the typical one."""
    work: float
    """Share of the work of all pieces in them."""
    exchanges: bool
    """Whether the typical piece exchanges data with the host."""


def steps_of(timeline: Timeline, stalls: Stalls) -> StepTable | None:
    """The steps of a device; None where nothing repeats."""
    single = _sequence(timeline, stalls)
    if len(single) < 2 * LEAST:
        return None
    cuts = _cuts(_without_repeats(single))
    called = _by_calls(timeline, single)
    # Stalls may also split the requests of one call of the program (it waits for a lock).
    least = called.operations if called is not None else 0
    exact = cuts if called is None else [called, *cuts]
    separated = [one for one in _at_stalls(stalls, single) if one.operations >= least]
    cuts += [_as_exact(one, exact) for one in separated]
    if called is not None and called.exchanges:
        cuts.append(called)
    exchanging = [one for one in cuts if one.exchanges]
    # A loop within the step (single copies) holds a part of the work, the step most of it.
    cut = _shortest([one for one in exchanging if one.work >= MOST] or exchanging)
    if cut is None:
        cut = called or _longest(cuts) or _same(single)
    if cut is None:
        return None
    begin, end = cut.at[:-1], cut.at[1:]
    like = cut.like
    if len(stalls.window) > 1:  # keep only pieces that lie within a window
        whole = Coverage(stalls.window).within(begin, end) == end - begin
        begin, end, like = begin[whole], end[whole], like[whole]
        if like.sum() < LEAST:
            return None
    duration = end - begin
    computing = Coverage(stalls.computing).within(begin, end)
    low, median, high = (int(np.percentile(duration[like], p)) for p in (10, 50, 90))
    return StepTable(
        count=len(begin),
        median_ns=median,
        p10_ns=low,
        p90_ns=high,
        operations=cut.operations,
        regularity=float(like.mean()),
        anchor=timeline.names[cut.name],
        start_ns=begin.tolist(),
        duration_ns=duration.tolist(),
        computing_ns=computing.tolist(),
        like=like.tolist(),
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
    launching = np.unique(calls.track[asks])
    waits = (calls.kind == CallKind.SYNC) & np.isin(calls.track, launching) & ~asks
    rows = np.flatnonzero(asks | waits)
    if not len(rows):
        return _of_device(stalls)
    asked = asks[rows]
    op = known[first[at[rows]]]
    count = np.where(asked, number[at[rows]], 0).astype(np.int32)
    name = np.where(asked, events.name[op], calls.name[rows])
    start = np.where(asked, events.start_ns[op], np.iinfo(np.int64).max)
    start = np.minimum.accumulate(start[::-1])[::-1]
    start = np.where(start == np.iinfo(np.int64).max, events.end_ns.max(), start)
    copied = (events.kind[op] == DeviceKind.COPY) & is_one_of(
        events.direction[op], CopyDirection.H2D, CopyDirection.D2H
    )
    return _Sequence(
        # Bits of a token: the name, the number of operations, and whether it is a wait.
        token=(name.astype(np.int64) << 24) ^ (np.minimum(count, 1 << 20) << 1) ^ ~asked,
        start=np.maximum.accumulate(start),
        work=np.where(asked, work[at[rows]], 0),
        operations=count,
        exchange=~asked | copied,
        name=name,
        asked=calls.start_ns[rows],
    )


def _of_device(stalls: Stalls) -> _Sequence:
    """The sequence of device operations, where correlation ids are missing."""
    events = stalls.events
    name = events.name
    copied = (events.kind == DeviceKind.COPY) & is_one_of(
        events.direction, CopyDirection.H2D, CopyDirection.D2H
    )
    return _Sequence(
        name.astype(np.int64) << 24,
        events.start_ns,
        events.duration_ns,
        np.ones(len(events), np.int32),
        copied,
        name,
        np.zeros(0, np.int64),
    )


def _without_repeats(single: _Sequence) -> _Sequence:
    """The sequence with equal requests that follow one another as one request."""
    first = np.ones(len(single), bool)
    first[1:] = single.token[1:] != single.token[:-1]
    rows = np.flatnonzero(first)
    length = np.diff(np.append(rows, len(single)))
    # How many there are is part of the token; the factor, a prime, mixes both.
    return single.grouped(rows, (single.token[rows] * 1_000_003) ^ length, single.name[rows])


def _numbered(tokens: I64) -> I32:
    """Equal numbers for equal tokens, from 0 on."""
    return np.searchsorted(np.unique(tokens), tokens).astype(np.int32)


def _cuts(sequence: _Sequence) -> list[_Cut]:
    """One cut for each frequency of requests: at the first one, of three that are tried, whose
    pieces are regular."""
    kinds = _numbered(sequence.token)
    counts = np.bincount(kinds)
    first = np.empty(len(counts), np.int64)
    first[kinds[::-1]] = np.arange(len(kinds) - 1, -1, -1)
    sums = _Sums(sequence, kinds)
    enough = np.flatnonzero(counts > LEAST)
    cuts = []
    for count in np.unique(counts[enough])[:CANDIDATES].tolist():
        alike = enough[counts[enough] == count]
        for kind in alike[np.argsort(first[alike])][:3].tolist():
            cut = _cut(sums, np.flatnonzero(kinds == kind))
            if cut is not None:
                cuts.append(cut)
                break
    return cuts


def _at_stalls(stalls: Stalls, sequence: _Sequence) -> list[_Cut]:
    """The cut at the request after each long stall, if the pieces are regular."""
    duration = stalls.duration_ns
    long = duration >= LONG_NS
    if long.sum() <= LEAST:
        return []
    long &= duration >= 0.5 * np.percentile(duration[long], 75)  # not the short ones among them
    at = np.unique(np.searchsorted(sequence.start, stalls.end[long], "left"))
    at = at[at < len(sequence)]
    if len(at) <= LEAST:
        return []
    cut = _cut(_Sums(sequence), at)
    return [replace(cut, exchanges=True)] if cut is not None and cut.covered >= WHOLE else []


def _as_exact(at_stalls: _Cut, exact: list[_Cut]) -> _Cut:
    """A cut at calls or requests into steps of the same size, if one is as regular.

    Stalls show the size of a step, but one may be missing, and a slow step may have two.
    """
    for one in exact:
        if one.operations == at_stalls.operations and one.covered >= at_stalls.covered:
            return replace(one, exchanges=True)
    return at_stalls


def _same(single: _Sequence) -> _Cut | None:
    """Each request as a piece, if nearly all are equal."""
    cut = _cut(_Sums(single), np.arange(len(single)), alternating=False)
    return cut if cut is not None and cut.covered >= WHOLE else None


def _by_calls(timeline: Timeline, single: _Sequence) -> _Cut | None:
    """The cut at repeated calls of the program: the outermost that hold nearly all requests."""
    if not len(single.asked):
        return None
    for function, named in loops.levels(timeline, single.asked):
        if (function >= 0).mean() < WORK:
            return None  # inner calls hold even fewer requests
        first = np.ones(len(single), bool)
        first[1:] = (function[1:] != function[:-1]) | (function[1:] < 0)
        rows = np.flatnonzero(first)
        if len(rows) <= LEAST:
            continue
        name = np.where(named[rows] >= 0, named[rows], single.name[rows]).astype(np.int32)
        token = np.where(named[rows] >= 0, -1 - named[rows], single.token[rows])
        called = single.grouped(rows, token, name, called=True)
        found = _shortest([one for one in _cuts(called) if one.covered >= WHOLE]) or _same(called)
        if found is not None and found.work >= WHOLE and found.name in named:
            return _of_size(called, found)
    return None


def _of_size(called: _Sequence, cut: _Cut) -> _Cut:
    """The cut with only those pieces alike that have about as many operations."""
    edges = np.searchsorted(called.start, cut.at, "left")
    number = np.diff(_running(called.operations)[edges])
    like = cut.like & (np.abs(number - cut.operations) <= _LOOSE * cut.operations + 1)
    return replace(cut, like=like) if like.any() else cut


class _Sums:
    """Running sums over a sequence, for the sums of any piece."""

    def __init__(self, sequence: _Sequence, number: I32 | None = None) -> None:
        """`number`: equal for equal requests, from 0 on; computed if left out."""
        self.of = sequence
        # Random codes: pieces with equal sums hold the same requests. Sums wrap around like hashes.
        if number is None:
            number = _numbered(sequence.token)
        self.code = _running(_random_codes(int(number.max(initial=0)) + 1)[number])
        self.work = _running(sequence.work)
        self.operations = _running(sequence.operations)
        self.exchange = _running(sequence.exchange)


def _random_codes(count: int) -> I64:
    """Numbers without a pattern, the same ones each time (splitmix64); NumPy's own generators are
    another 4 MB, which a tree without Python on the host leaves out."""
    codes = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        codes = (codes ^ (codes >> np.uint64(shift))) * np.uint64(factor)
    return (codes ^ (codes >> np.uint64(31))).view(np.int64)


def _running(values: np.ndarray) -> I64:
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=sums[1:])
    return sums


def _cut(sums: _Sums, at: I64, alternating: bool = True) -> _Cut | None:
    """The cut at these requests, None where its pieces are not regular. `alternating`: typical
    pieces may be joined with those that follow them."""
    length = np.diff(at)
    inner = int(length.sum())
    if inner < 0.5 * len(sums.of) or len(length) < LEAST:
        return None  # too much lies outside of all pieces
    inverse = np.unique(np.diff(sums.code[at]), return_inverse=True)[1]
    work = np.diff(sums.work[at])
    exchanging = np.diff(sums.exchange[at]) > 0
    like: Mask = inverse == int(np.bincount(inverse, work + length).argmax())
    regular = like | _repeated(inverse, exchanging | sums.of.called)
    covered = float(length[regular].sum()) / inner
    if (like[1:] & like[:-1]).sum() < CHAIN * like[:-1].sum():
        # Pieces alternate: a step is from one typical piece to the next.
        merged = _cut(sums, at[:-1][like], alternating=False) if alternating else None
        if merged is not None or covered >= REGULAR:
            return merged
    if covered < REGULAR:
        # Shapes may differ from step to step; then the number of requests must be similar.
        middle = float(np.median(length))
        like = regular = np.abs(length - middle) <= _LOOSE * middle
        # 0.99: of two cuts that cover as much, the one with equal pieces is preferred.
        covered = 0.99 * float(length[like].sum()) / inner if middle >= 8 else 0.0
    mine = int(work[regular].sum())
    if covered < REGULAR or like.sum() < LEAST or mine < WORK * int(sums.work[-1]):
        return None
    return _Cut(
        name=int(sums.of.name[at[0]]),
        at=sums.of.start[at],
        like=like,
        operations=int(np.median(np.diff(sums.operations[at])[like])),
        covered=covered,
        work=mine / max(1, int(work.sum())),
        exchanges=bool(exchanging[like].mean() > 0.8),
    )


def _repeated(kind: I64, exchanging: Mask) -> Mask:
    """Pieces that repeat one after another and exchange data with the host or were called: steps of
    training, of an evaluation."""
    number = np.bincount(kind)
    after = np.bincount(kind[1:][kind[1:] == kind[:-1]], minlength=len(number))
    often = (number >= LEAST) & (after >= CHAIN * number)
    found: Mask = (often & (np.bincount(kind, exchanging) > 0.8 * number))[kind]
    return found


def _shortest(cuts: list[_Cut]) -> _Cut | None:
    """The one with the fewest operations in a piece."""
    return min(cuts, key=lambda cut: (cut.operations, -cut.covered), default=None)


def _longest(cuts: list[_Cut]) -> _Cut | None:
    """The one with the most operations in a piece, of those that repeat often if any does."""
    often = [cut for cut in cuts if len(cut.at) > 2 * LEAST] or cuts
    return max(often, key=lambda cut: (cut.covered >= WHOLE, cut.operations), default=None)
