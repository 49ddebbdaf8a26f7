# SPDX-License-Identifier: Apache-2.0
"""Which rank, stage or link the ranks of a job wait for, by times that a server stores of each.

Compared are ranks of one job in the same slots of time, by device time at work. Where that is alike
and one of them hardly waits in collectives, its host is late. Stages of a pipeline are not stored:
ranks of which a group works equally much longer than the rest count as one. Exchanges between two
ranks end at both at once: what both spend in it together is the transfer, the rest is waiting.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from sonde.analyze.stragglers import LEAST, Straggle, Work, straggling

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
    excess: dict[Straggle, float] = field(default_factory=dict)
    """As in `Straggling`."""


@dataclass(frozen=True, slots=True)
class SlowLink:
    """Two ranks between which exchanges take longer than between others."""

    ranks: tuple[int, int]
    seconds: float
    usual_s: float
    exchanges: int


def slow_ranks(times: RankTimes, pieces: Pieces | None = None) -> SlowRanks:
    """Whom the others wait for. Without `pieces`, unequal sequences are not seen."""
    kept = times.slot_ns > 0
    length = times.slot_ns[kept]
    work = times.work[:, kept] / length
    waits = np.minimum(times.collective[:, kept] / length, 1)
    if work.shape[0] < 2 or (np.isfinite(work).sum(axis=1) >= LEAST_SLOTS).sum() < 2:
        return SlowRanks(Straggle.NOTHING)
    late = _longest(work, _LEAST_WORK)
    excess = dict.fromkeys((Straggle.WORKER, Straggle.STAGE, Straggle.SEQUENCES), 0.0)
    mean = _means(work)
    if late is not None:
        rest = np.setdiff1d(np.flatnonzero(np.isfinite(mean)), late)
        kind = Straggle.STAGE if _is_stage(len(late), work.shape[0]) else Straggle.WORKER
        excess[kind] = float(np.median(mean[late]) / max(np.median(mean[rest]), 1e-9) - 1)
    if pieces is not None:
        excess[Straggle.SEQUENCES] = _of_sequences(pieces, set(() if late is None else late))
    kind = max(excess, key=lambda it: excess[it])
    if excess[kind] >= LEAST and kind == Straggle.SEQUENCES:
        usual = float(np.nanmedian(mean))
        return SlowRanks(
            kind, (), min(1.0, usual * excess[kind] / (1 + excess[kind])), False, excess
        )
    if excess[kind] >= LEAST and late is not None:
        rest = np.setdiff1d(np.flatnonzero(np.isfinite(mean)), late)
        lost = float(np.median(mean[late]) - np.median(mean[rest]))
        return SlowRanks(kind, tuple(late.tolist()), min(1.0, lost), False, excess)
    return _by_host(waits, excess)


def _by_host(waits: Floats, excess: dict[Straggle, float]) -> SlowRanks:
    """The rank that hardly waits, though it has no more work than the others."""
    late = _longest(1 - waits, LEAST)
    if late is None:
        return SlowRanks(Straggle.NOTHING, excess=excess)
    mean = _means(waits)
    rest = np.setdiff1d(np.flatnonzero(np.isfinite(mean)), late)
    lost = float(np.median(mean[rest]) - np.median(mean[late]))
    kind = Straggle.STAGE if _is_stage(len(late), waits.shape[0]) else Straggle.WORKER
    return SlowRanks(kind, tuple(late.tolist()), lost, True, excess | {kind: lost})


def _is_stage(count: int, ranks: int) -> bool:
    return count > 1 and count >= _STAGE * ranks


def _means(values: Floats) -> Floats:
    """By rank; NaN for who was timed in too few slots."""
    seen = np.isfinite(values)
    count = seen.sum(axis=1)
    total = np.where(seen, values, 0).sum(axis=1)
    return np.where(count >= LEAST_SLOTS, total / np.maximum(count, 1), np.nan)


def _longest(values: Floats, least: float) -> Whole | None:
    """The ranks beyond the largest gap of the upper half, where it stands out."""
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
            return None
        each = np.nanmedian(values[late][:, slots], axis=0)
        each -= np.nanmedian(values[rest][:, slots], axis=0)
    error = float(each.std(ddof=1)) / len(slots) ** 0.5
    return np.sort(late) if float(each.mean()) > _DEVIATIONS * error else None


def _of_sequences(pieces: Pieces, late: set[int]) -> float:
    """How much longer pieces take by the longest of those that are worked on at a time. Compared
    are ranks with the same number of pieces in a step, of one stage."""
    rows = list(
        zip(
            pieces.rank.tolist(), pieces.step.tolist(), pieces.piece.tolist(),
            pieces.seconds.tolist(), strict=True,
        )
    )  # fmt: skip
    counts = Counter((rank, step) for rank, step, _, _ in rows)
    work = [
        Work(
            f"{rank in late} {counts[rank, step]} {piece}", int(rank in late), rank, step, piece, ns
        )
        for rank, step, piece, ns in rows
    ]
    its: dict[tuple[str, int], list[float]] = defaultdict(list)
    for one in work:
        its[one.operation, one.replica].append(one.seconds)
    by_usual = [np.array(same) / max(float(np.median(same)), 1e-9) for same in its.values()]
    low, high = np.quantile(np.concatenate(by_usual), (0.25, 0.75)) if by_usual else (0.0, 0.0)
    # Of many ranks the longest is an outlier: the usual piece has to differ, too.
    return straggling(work).excess[Straggle.SEQUENCES] if high - low >= _VARIES else 0.0


def slow_links(rank: Whole, start_ns: Whole, end_ns: Whole, most: int = 8) -> list[SlowLink]:
    """Pairs of ranks whose exchanges take longest, the slowest first, of kernels that send or
    receive: columns of equal length. Empty where none stands out."""
    if len(rank) < _LEAST_EXCHANGES:
        return []
    length = (end_ns - start_ns).astype(np.float64)
    floors = [float(np.quantile(length[rank == one], 0.25)) for one in np.unique(rank)]
    least = max(_LONGER * float(np.median(floors)), 2.0 * _ALIKE_NS)
    many = np.bincount(rank, length >= least) / np.maximum(np.bincount(rank), 1)
    usually = float(np.median(many[np.unique(rank)]))
    long = np.flatnonzero((length >= least) & (many[rank] > usually + _MORE_LONG))
    long = long[np.argsort(end_ns[long], kind="stable")]
    its = Counter(rank[long].tolist())
    together: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    ends, begins, ranks = end_ns[long], start_ns[long], rank[long]
    last = np.searchsorted(ends, ends + _ALIKE_NS, "right")
    for at in range(len(long)):
        for other in range(at + 1, min(int(last[at]), at + 1 + _NEIGHBOURS)):
            shared = float(ends[at] - max(begins[at], begins[other]))
            if ranks[at] != ranks[other] and shared >= least:
                low, high = (at, other) if ranks[at] < ranks[other] else (other, at)
                apart = float(ends[high] - ends[low])
                together[int(ranks[low]), int(ranks[high])].append((apart, shared))
    usual = float(np.median(floors)) / 1e9
    found = []
    for pair, runs in together.items():
        each = np.array(runs)
        # Clocks of two nodes differ by as much each time: other coincidences do not.
        each = each[abs(each[:, 0] - np.median(each[:, 0])) <= _SAME_NS]
        if len(each) >= max(_LEAST_EXCHANGES, _OF_ITS * min(its[pair[0]], its[pair[1]])):
            found.append(SlowLink(pair, float(np.median(each[:, 1])) / 1e9, usual, len(each)))
    found.sort(key=lambda one: (-one.exchanges * (one.seconds - usual), one.ranks))
    return found[:most]
