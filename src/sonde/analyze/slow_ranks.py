# SPDX-License-Identifier: Apache-2.0
"""Which rank, stage or link the ranks of a job wait for, by times that a server stores of each.

Ranks of one job are compared in the same slots of time, by the time that their devices work. Where
that is alike and one of them hardly waits in collectives, its host is late. Stages of a pipeline
are not stored: a group of ranks that work longer than the rest by the same amount counts as one. An
exchange between two ranks ends at both at once: the time that both are in it is the transfer, the
rest is waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from sonde.analyze.stragglers import LEAST, Straggle

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

LEAST_SLOTS: Final = 4
"""Fewer slots in which two ranks were both timed do not compare them."""
_APART: Final = 0.4
"""Slow ranks stand out if the largest gap between ranks is at least this part of the difference
between the medians of slow and other ranks."""
_LEAST_WORK: Final = 0.02
"""Part of a slot by which slow ranks work longer at least. Relative to the usual work it is `LEAST`
at least."""
_DEVIATIONS: Final = 4.0
"""The difference is certain if its mean over slots is this many standard errors above 0."""
_STAGE: Final = 1 / 16
"""A slow group with this share of the ranks, two at least, is a stage."""
_ALIKE_NS: Final = 2_000_000
"""By how much the end of an exchange may differ between its two ranks, as clocks of nodes do."""
_LONGER: Final = 2.0
"""A slow exchange takes at least this many times as long as a usual one."""
_OF_ITS: Final = 0.6
"""A slow link has this share of the long exchanges of one of its ranks at least."""
_LEAST_EXCHANGES: Final = 6
"""And this many."""
_MORE_LONG: Final = 0.1
"""A rank of a slow link has a share of long exchanges that is above the median one by this."""
_SAME_NS: Final = 100_000
"""By how much the difference between the ends of a pair's exchanges may vary around its median."""
_VARIES: Final = 0.1
"""Least interquartile range of pieces, each divided by its rank's median, if sequences differ."""
_NEIGHBOURS: Final = 64
"""An exchange is compared with this many at most of those that end at about the same time."""
MAX_LONG: Final = 20_000
"""Long exchanges that are compared; of more the answer is not known."""
MAX_PAIRS: Final = 200_000
"""Pairs of long exchanges that share enough time; of more the answer is not known."""
_WAITED_FOR: Final = 0.5
"""A rank waits for the slow ones if it is longer in collectives than they are by this part of the
difference in work."""
_LEAST_WAITING: Final = 2
"""At least this many ranks, and as many as a stage has, must wait: ranks of other stages may wait
elsewhere."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Times in ns: a row for each rank, a column for each slot; NaN where one was not timed."""

    work: Floats
    """Kernels that are no collectives."""
    collective: Floats
    """Kernels of collectives."""
    slot_ns: Floats
    """Length of each slot."""
    are_steps: bool = False
    """Whether slots are steps of the job, not bins of equal length."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Work of ranks between two exchanges with others, in columns of equal length."""

    rank: Whole
    """Row of `RankTimes`."""
    step: Whole
    piece: Whole
    """Its number within the step."""
    seconds: Floats


@dataclass(frozen=True, slots=True)
class SlowRanks:
    """What was found."""

    kind: Straggle
    ranks: tuple[int, ...] = ()
    """The slow ones, as rows of `RankTimes`."""
    lost: float = 0.0
    """Share of a slot that the others lose by it."""
    by_host: bool = False
    """They work no longer on their devices, but wait less in collectives than all others."""
    others_wait: bool = True
    """False: the slow ones have more work, but the others do not wait for them in collectives, so
    nothing is lost."""
    is_known: bool = True
    """False: the slow ranks and the others were timed in too few of the same slots to compare."""
    excess: dict[Straggle, float] = field(default_factory=dict)
    """How much longer work takes by each kind, relative to the usual; 0.3: 30 %."""


@dataclass(frozen=True, slots=True)
class SlowLink:
    """Two ranks between which exchanges take longer than between others."""

    ranks: tuple[int, int]
    """As numbers of the rows that were compared."""
    seconds: float
    """Median length of its long exchanges, s."""
    usual_s: float
    """Median over ranks of a short exchange's length (lower quartile), s."""
    exchanges: int
    """Number of the long ones."""


def slow_ranks(
    times: RankTimes, pieces: Pieces | None = None, check: Callable[[], None] = lambda: None
) -> SlowRanks:
    """Which ranks the others wait for. Without `pieces`, unequal sequences are not seen. Raises
    what `check` raises, which is called now and then."""
    kept = times.slot_ns > 0
    length = times.slot_ns[kept]
    work = times.work[:, kept] / length
    waits = np.minimum(times.collective[:, kept] / length, 1)
    if work.shape[0] < 2 or (np.isfinite(work).sum(axis=1) >= LEAST_SLOTS).sum() < 2:
        return SlowRanks(Straggle.NOTHING, is_known=False)
    late = _longest(work, _LEAST_WORK)
    if late is not None and not len(late):
        return SlowRanks(Straggle.NOTHING, is_known=False)
    check()
    excess = dict.fromkeys((Straggle.WORKER, Straggle.STAGE, Straggle.SEQUENCES), 0.0)
    mean = _means(work)
    of_late = SlowRanks(Straggle.NOTHING, excess=excess)
    if late is not None:
        rest = np.setdiff1d(np.flatnonzero(np.isfinite(mean)), late)
        kind = Straggle.STAGE if _is_stage(len(late), work.shape[0]) else Straggle.WORKER
        usual, longer = float(np.median(mean[rest])), float(np.median(mean[late]))
        excess[kind] = longer / max(usual, 1e-9) - 1
        lost = longer - usual
        is_waited_for = _is_waited_for(mean, _means(waits), late, rest)
        if excess[kind] >= LEAST:
            of_late = SlowRanks(
                kind, tuple(late.tolist()), min(1.0, lost) if is_waited_for else 0.0,
                False, is_waited_for, excess=excess,
            )  # fmt: skip
    if pieces is not None:
        excess[Straggle.SEQUENCES] = of = _of_sequences(pieces, late, check)
        is_less = not of_late.others_wait or of > excess.get(of_late.kind, 0.0)
        if of >= LEAST and is_less:
            lost = min(1.0, float(np.nanmedian(mean)) * of / (1 + of))
            return SlowRanks(Straggle.SEQUENCES, (), lost, excess=excess)
    if of_late.ranks and of_late.others_wait:
        return of_late
    by_host = _by_host(waits, excess)
    return of_late if of_late.ranks and by_host.kind == Straggle.NOTHING else by_host


def _is_waited_for(work: Floats, waits: Floats, late: Whole, rest: Whole) -> bool:
    """Whether enough of the others are longer in collectives, by what they work less."""
    less = np.median(work[late]) - work[rest]
    longer = waits[rest] - np.median(waits[late])
    waiting = int((longer >= _WAITED_FOR * less).sum())
    return waiting >= min(len(rest), max(_LEAST_WAITING, _STAGE * len(rest)))


def _by_host(waits: Floats, excess: dict[Straggle, float]) -> SlowRanks:
    """The ranks that hardly wait, though they have no more work than the others."""
    late = _longest(1 - waits, LEAST)
    if late is None or not len(late):
        return SlowRanks(Straggle.NOTHING, excess=excess, is_known=late is None)
    mean = _means(waits)
    rest = np.setdiff1d(np.flatnonzero(np.isfinite(mean)), late)
    lost = float(np.median(mean[rest]) - np.median(mean[late]))
    kind = Straggle.STAGE if _is_stage(len(late), waits.shape[0]) else Straggle.WORKER
    return SlowRanks(kind, tuple(late.tolist()), lost, True, excess=excess | {kind: lost})


def _is_stage(count: int, ranks: int) -> bool:
    """Whether a slow group of `count` ranks is a stage."""
    return count > 1 and count >= _STAGE * ranks


def _means(values: Floats) -> Floats:
    """Mean of each rank; NaN where it was timed in too few slots."""
    seen = np.isfinite(values)
    count = seen.sum(axis=1)
    total = np.where(seen, values, 0).sum(axis=1)
    return np.where(count >= LEAST_SLOTS, total / np.maximum(count, 1), np.nan)


def _longest(values: Floats, least: float) -> Whole | None:
    """The ranks above the largest gap in the upper half, if it stands out; None if none does; empty
    if these ranks and the rest were timed in too few of the same slots."""
    mean = _means(values)
    known = np.flatnonzero(np.isfinite(mean))
    order = known[np.argsort(mean[known], kind="stable")]
    half = len(order) - len(order) // 2
    if len(order) < 2:
        return None
    gaps = np.diff(mean[order])[half - 1 :]
    at = half + int(np.argmax(gaps))
    late, rest = order[at:], order[:at]
    apart = float(np.median(mean[late]) - np.median(mean[rest]))
    if apart < least or float(gaps.max()) < _APART * apart:
        return None
    # The difference of each slot, so that what slows all ranks in one counts for none.
    with np.errstate(all="ignore"):
        seen = np.isfinite(values[late]).any(axis=0) & np.isfinite(values[rest]).any(axis=0)
        slots = np.flatnonzero(seen)
        if len(slots) < LEAST_SLOTS:
            return late[:0]
        each = np.nanmedian(values[late][:, slots], axis=0)
        each -= np.nanmedian(values[rest][:, slots], axis=0)
    error = float(each.std(ddof=1)) / len(slots) ** 0.5
    return np.sort(late) if float(each.mean()) > _DEVIATIONS * error else None


def _of_sequences(pieces: Pieces, late: Whole | None, check: Callable[[], None]) -> float:
    """How much longer pieces take because ranks wait for the longest of those that are worked on at
    the same time (`Straggle.SEQUENCES`). Ranks of one stage are compared that have the same number
    of pieces in a step."""
    if not len(pieces.rank):
        return 0.0
    of_step = _numbers(pieces.rank, pieces.step)
    is_late = np.isin(pieces.rank, () if late is None else late).astype(np.int64)
    operation = _numbers(is_late, np.bincount(of_step)[of_step], pieces.piece)
    own = _numbers(operation, pieces.rank)
    check()
    by_usual = pieces.seconds / np.maximum(_quantiles(own, pieces.seconds, 0.5), 1e-9)[own]
    low, high = np.quantile(by_usual, (0.25, 0.75))
    # Of many ranks the longest is an outlier: the usual piece has to differ, too.
    some = pieces.seconds > 0
    if high - low < _VARIES or not some.any():
        return 0.0
    check()
    operation, seconds = _numbers(operation[some]), pieces.seconds[some]
    own = _numbers(operation, pieces.rank[some])
    left = seconds / _quantiles(own, seconds, 0.5)[own]
    together = _numbers(operation, pieces.step[some])
    count = np.bincount(together)
    largest = np.zeros(len(count))
    np.maximum.at(largest, together, left)
    spread = largest / (np.bincount(together, left) / count) - 1
    of_operation = np.zeros(len(count), np.int64)
    of_operation[together] = operation
    check()
    several = count > 1
    compared = np.unique(of_operation[several])
    if not len(compared):
        return 0.0
    each = _quantiles(_numbers(of_operation[several]), spread[several], 0.5)
    weight = np.bincount(operation, seconds)
    return float((each * weight[compared]).sum() / weight.sum())


def _numbers(*columns: Whole) -> Whole:
    """A number for each row, from 0: equal for rows that are equal in all columns, in the order of
    their values."""
    found = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, inverse = np.unique(column, return_inverse=True)
        found = np.unique(found * len(values) + inverse, return_inverse=True)[1].astype(np.int64)
    return found


def _quantiles(group: Whole, values: Floats, share: float) -> Floats:
    """The quantile of each group, as `np.quantile` computes it. Groups are numbered from 0 on, none
    is empty."""
    by_size = values[np.lexsort((values, group))]
    count = np.bincount(group)
    first = np.cumsum(count) - count
    at = share * (count - 1)
    low = at.astype(np.int64)
    below = by_size[first + low]
    above = by_size[first + np.minimum(low + 1, count - 1)]
    found: Floats = below + (above - below) * (at - low)
    return found


def slow_links(
    rank: Whole,
    start_ns: Whole,
    end_ns: Whole,
    most: int = 8,
    check: Callable[[], None] = lambda: None,
) -> list[SlowLink] | None:
    """At most `most` pairs of ranks whose exchanges take longest, the costliest first.

    The columns are of kernels that send or receive. Empty where none stands out; None where more
    are long than are compared. Raises what `check` raises, which is called again and again.
    """
    if len(rank) < _LEAST_EXCHANGES:
        return []
    length = (end_ns - start_ns).astype(np.float64)
    whose, number = np.unique(rank, return_inverse=True)
    usual_ns = float(np.median(_quantiles(number, length, 0.25)))
    check()
    least = max(_LONGER * usual_ns, 2.0 * _ALIKE_NS)
    many = np.bincount(number, length >= least) / np.bincount(number)
    long = np.flatnonzero((length >= least) & (many[number] > np.median(many) + _MORE_LONG))
    if len(long) > MAX_LONG:
        return None
    long = long[np.argsort(end_ns[long], kind="stable")]
    found = _pairs(number[long], start_ns[long], end_ns[long], least, check)
    if found is None:
        return None
    first, second, apart, shared = found
    its = np.bincount(number[long], minlength=len(whose))
    needed = np.maximum(_LEAST_EXCHANGES, _OF_ITS * np.minimum(its[first], its[second]))
    pair = _numbers(first, second)
    chosen = np.bincount(pair)[pair] >= needed
    # Clocks of two nodes differ by as much each time: other coincidences do not.
    chosen[chosen] = _are_alike(_numbers(pair[chosen]), apart[chosen])
    check()
    pair, needed = _numbers(pair[chosen]), needed[chosen]
    chosen[chosen] = np.bincount(pair)[pair] >= needed
    if not chosen.any():
        return []
    first, second, shared = first[chosen], second[chosen], shared[chosen]
    pair = _numbers(first, second)
    seconds, count = _quantiles(pair, shared, 0.5) / 1e9, np.bincount(pair)
    at = np.unique(pair, return_index=True)[1]
    links = [
        SlowLink(
            (int(whose[first[row]]), int(whose[second[row]])), float(took), usual_ns / 1e9, int(n)
        )
        for row, took, n in zip(at.tolist(), seconds, count, strict=True)
    ]
    links.sort(key=lambda one: (-one.exchanges * (one.seconds - one.usual_s), one.ranks))
    return links[:most]


def _are_alike(pair: Whole, apart: Floats) -> npt.NDArray[np.bool_]:
    """Whether the difference between the two ends is about the usual one of the pair."""
    if not len(pair):
        return np.zeros(0, np.bool_)
    found: npt.NDArray[np.bool_] = abs(apart - _quantiles(pair, apart, 0.5)[pair]) <= _SAME_NS
    return found


def _pairs(
    rank: Whole, begin_ns: Whole, end_ns: Whole, least: float, check: Callable[[], None]
) -> tuple[Whole, Whole, Floats, Floats] | None:
    """Pairs of exchanges of two ranks that end together and overlap for `least`, ns: (lower rank,
    higher rank, by how much later the latter's ends, overlap). None: too many. The columns are
    sorted by end."""
    last = np.searchsorted(end_ns, end_ns + _ALIKE_NS, "right")
    parts: list[tuple[Whole, Whole, Floats, Floats]] = []
    count = 0
    for step in range(1, min(_NEIGHBOURS, len(rank) - 1) + 1):
        check()
        at = np.flatnonzero(last[:-step] > np.arange(step, len(rank)))
        if not len(at):
            break
        other = at + step
        shared = (end_ns[at] - np.maximum(begin_ns[at], begin_ns[other])).astype(np.float64)
        chosen = (rank[at] != rank[other]) & (shared >= least)
        at, other, shared = at[chosen], other[chosen], shared[chosen]
        count += len(at)
        if count > MAX_PAIRS:
            return None
        is_lower = rank[at] < rank[other]
        low, high = np.where(is_lower, at, other), np.where(is_lower, other, at)
        apart = (end_ns[high] - end_ns[low]).astype(np.float64)
        parts.append((rank[low], rank[high], apart, shared))
    if not parts:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
    first, second, apart, shared = (np.concatenate(column) for column in zip(*parts, strict=True))
    return first, second, apart, shared
