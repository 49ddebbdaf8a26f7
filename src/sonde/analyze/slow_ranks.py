# SPDX-License-Identifier: Apache-2.0
"""Which rank, stage or link the ranks of a job wait for, by times that a server stores of each.

Compared are ranks of one job in the same slots of time, by device time at work. Where that is alike
and one of them hardly waits in collectives, its host is late. Stages of a pipeline are not stored:
ranks of which a group works equally much longer than the rest count as one. Exchanges between two
ranks end at both at once: what both spend in it together is the transfer, the rest is waiting.
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
"""Slots in which two ranks were timed both."""
_APART: Final = 0.4
"""Of the way from the usual to the slow ones that is free of ranks."""
_LEAST_WORK: Final = 0.02
"""Of a slot, by which slow ranks work longer; by their own work it is `LEAST` at least."""
_DEVIATIONS: Final = 4.0
_STAGE: Final = 1 / 16
"""Share of the ranks from which on a slow group is a stage."""
_ALIKE_NS: Final = 2_000_000
"""By how much two ends of an exchange may differ: clocks of nodes do."""
_LONGER: Final = 2.0
"""A slow exchange by a usual one."""
_OF_ITS: Final = 0.6
"""Share of the long exchanges of a rank that are with the same one."""
_LEAST_EXCHANGES: Final = 6
_MORE_LONG: Final = 0.1
"""Share of its exchanges that are long, beyond that of the usual rank."""
_SAME_NS: Final = 100_000
"""By how much the difference of two ends may vary."""
_VARIES: Final = 0.1
"""Between the quartiles of pieces by the median of the same rank: what sequences differ by."""
_NEIGHBOURS: Final = 64
"""Exchanges that end at about the same time and are compared: bounds the work."""
MAX_LONG: Final = 20_000
"""Long exchanges that are compared; of more the answer is not known."""
MAX_PAIRS: Final = 200_000
"""Pairs of them that share enough time."""
_WAITED_FOR: Final = 0.5
"""Of the difference in work, by which a rank that waits is longer in collectives at least."""
_LEAST_WAITING: Final = 2
"""Ranks that wait, and as many as a stage has: those of other stages may wait otherwise."""


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


@dataclass(frozen=True, slots=True)
class Pieces:
    """Work between two exchanges of a rank, in order: columns of equal length, seconds."""

    rank: Whole
    step: Whole
    piece: Whole
    seconds: Floats


@dataclass(frozen=True, slots=True)
class SlowRanks:
    """What was found."""

    kind: Straggle
    ranks: tuple[int, ...] = ()
    """The slow ones, as rows of `RankTimes`."""
    lost: float = 0.0
    """Share of a slot by which it is longer."""
    by_host: bool = False
    """They work no longer on their devices, but wait less in collectives than all others."""
    others_wait: bool = True
    """False: they have more work, and the others are not longer in collectives: nothing is lost."""
    is_known: bool = True
    """False: who stands out and the rest were timed in too few of the same slots."""
    excess: dict[Straggle, float] = field(default_factory=dict)
    """As in `Straggling`."""


@dataclass(frozen=True, slots=True)
class SlowLink:
    """Two ranks between which exchanges take longer than between others."""

    ranks: tuple[int, int]
    seconds: float
    usual_s: float
    exchanges: int


def slow_ranks(
    times: RankTimes, pieces: Pieces | None = None, check: Callable[[], None] = lambda: None
) -> SlowRanks:
    """Whom the others wait for. Without `pieces`, unequal sequences are not seen. Raises what
    `check` does, which is called between steps of the work."""
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
    """Whether others are longer in collectives for what they have less to do."""
    less = np.median(work[late]) - work[rest]
    longer = waits[rest] - np.median(waits[late])
    waiting = int((longer >= _WAITED_FOR * less).sum())
    return waiting >= min(len(rest), max(_LEAST_WAITING, _STAGE * len(rest)))


def _by_host(waits: Floats, excess: dict[Straggle, float]) -> SlowRanks:
    """The rank that hardly waits, though it has no more work than the others."""
    late = _longest(1 - waits, LEAST)
    if late is None or not len(late):
        return SlowRanks(Straggle.NOTHING, excess=excess, is_known=late is None)
    mean = _means(waits)
    rest = np.setdiff1d(np.flatnonzero(np.isfinite(mean)), late)
    lost = float(np.median(mean[rest]) - np.median(mean[late]))
    kind = Straggle.STAGE if _is_stage(len(late), waits.shape[0]) else Straggle.WORKER
    return SlowRanks(kind, tuple(late.tolist()), lost, True, excess=excess | {kind: lost})


def _is_stage(count: int, ranks: int) -> bool:
    return count > 1 and count >= _STAGE * ranks


def _means(values: Floats) -> Floats:
    """By rank; NaN for who was timed in too few slots."""
    seen = np.isfinite(values)
    count = seen.sum(axis=1)
    total = np.where(seen, values, 0).sum(axis=1)
    return np.where(count >= LEAST_SLOTS, total / np.maximum(count, 1), np.nan)


def _longest(values: Floats, least: float) -> Whole | None:
    """The ranks beyond the largest gap of the upper half, where it stands out; empty where they
    were timed in too few of the slots of the rest."""
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
    """How much longer pieces take by the longest of those that are worked on at a time, as
    `stragglers.straggling` has it. Compared are ranks with the same number of pieces in a step, of
    one stage."""
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
    """Rows that are alike in all columns by one number, from 0, in the order of their values."""
    found = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, inverse = np.unique(column, return_inverse=True)
        found = np.unique(found * len(values) + inverse, return_inverse=True)[1].astype(np.int64)
    return found


def _quantiles(group: Whole, values: Floats, share: float) -> Floats:
    """By group (each number from 0 on has values), as `np.quantile` has it."""
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
    """Pairs of ranks whose exchanges take longest, the slowest first, of kernels that send or
    receive: columns of equal length. Empty where none stands out; None where more are long than are
    compared. Raises what `check` does, which is called again and again."""
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
    if not len(pair):
        return np.zeros(0, np.bool_)
    found: npt.NDArray[np.bool_] = abs(apart - _quantiles(pair, apart, 0.5)[pair]) <= _SAME_NS
    return found


def _pairs(
    rank: Whole, begin_ns: Whole, end_ns: Whole, least: float, check: Callable[[], None]
) -> tuple[Whole, Whole, Floats, Floats] | None:
    """Of exchanges by their end: pairs of two ranks that end together and share `least`, ns:
    (lower rank, higher rank, by how much its end is later, what they share). None: too many."""
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
