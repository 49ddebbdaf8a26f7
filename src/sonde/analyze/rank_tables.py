# SPDX-License-Identifier: Apache-2.0
"""Stored times of ranks as the arrays that `slow_ranks` compares."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from sonde.analyze.slow_ranks import LEAST_SLOTS, Pieces, RankTimes, SlowLink, slow_links

Key = tuple[str, int, int, int]
"""Node, pid, start and device: a rank."""


def times_of(answer: Mapping[str, Any]) -> RankTimes:
    """Of the answer of `sonde.query.stored_ranks.ranks`. A rank of which every run was timed was
    idle where it has none, between its first run and its last one."""
    slots, cells = answer["slots"], answer["cells"]
    length = np.subtract(slots["end_ns"], slots["start_ns"]).astype(np.float64)
    at = (np.array(cells["rank"], np.int64), np.array(cells["slot"], np.int64))
    filled = []
    for name in ("work_ns", "collective_ns"):
        values = np.full((len(answer["ranks"]), len(length)), np.nan)
        values[at] = cells[name]
        seen = np.isfinite(values)
        since = np.maximum.accumulate(seen, axis=1)
        until = np.maximum.accumulate(seen[:, ::-1], axis=1)[:, ::-1]
        timed = np.array([bool(one["all_timed"]) for one in answer["ranks"]], np.bool_)[:, None]
        values[timed & since & until & ~seen] = 0
        filled.append(values)
    return RankTimes(filled[0], filled[1], length, answer["by"] == "steps")


def leave_out_alone(times: RankTimes) -> int:
    """Make those that were timed and ran no collective ranks that were not timed; returns how
    many."""
    seen = np.isfinite(times.work).any(axis=1)
    apart = seen & ~(np.nan_to_num(times.collective).sum(axis=1) > 0)
    times.work[apart] = times.collective[apart] = np.nan
    return int(apart.sum())


def leave_out_thin(times: RankTimes) -> int:
    """Make those that were timed in too few slots in which others were, too, ranks that were not
    timed; returns how many were not, with those that were none before."""
    seen = np.isfinite(times.work)
    common = seen & (seen.sum(axis=0) > 1)
    thin = common.sum(axis=1) < LEAST_SLOTS
    times.work[thin] = times.collective[thin] = np.nan
    return int(thin.sum())


def shares(times: RankTimes, rank: int) -> tuple[float, float]:
    """(at work, in collectives) of the time in which a rank was timed."""
    found = []
    for ns in (times.work[rank], times.collective[rank]):
        seen = np.isfinite(ns)
        whole = float(times.slot_ns[seen].sum())
        found.append(round(float(ns[seen].sum()) / whole, 4) if whole else 0.0)
    return found[0], found[1]


def usual_shares(times: RankTimes, but: Collection[int]) -> tuple[float, float]:
    """The medians of the others."""
    timed = np.flatnonzero(np.isfinite(times.work).any(axis=1)).tolist()
    rest = [shares(times, at) for at in timed if at not in but]
    if not rest:
        return 0.0, 0.0
    work, waits = np.median(np.array(rest), axis=0).tolist()
    return work, waits


def slot_s(times: RankTimes) -> tuple[float, float]:
    """(length of the usual slot, of all), s."""
    return float(np.median(times.slot_ns)) / 1e9, float(times.slot_ns.sum()) / 1e9


def pieces_of(columns: Mapping[str, Sequence[Any]], keys: Mapping[Key, int]) -> Pieces | None:
    """Of the columns of `sonde.query.stored_pieces.pieces`; None: there are none."""
    rank = _numbers(columns, keys)
    known = rank >= 0
    if not known.any():
        return None
    return Pieces(
        rank[known],
        np.array(columns["slot"], np.int64)[known],
        np.array(columns["piece"], np.int64)[known],
        np.array(columns["ns"], np.float64)[known] / 1e9,
    )


def links_of(
    columns: Mapping[str, Sequence[Any]], keys: Mapping[Key, int], check: Callable[[], None]
) -> list[SlowLink] | None:
    """Slow links, by the columns of `sonde.query.stored_pieces.exchanges`; None as `slow_links`.
    Raises what `check` does."""
    rank = _numbers(columns, keys)
    check()
    known = rank >= 0
    begin, end = (np.array(columns[name], np.int64)[known] for name in ("begin_ns", "end_ns"))
    return slow_links(rank[known], begin, end, check=check)


def _numbers(columns: Mapping[str, Sequence[Any]], keys: Mapping[Key, int]) -> Any:
    who = zip(*(columns[name] for name in ("node", "pid", "start_ns", "device")), strict=True)
    return np.array([keys.get(one, -1) for one in who], np.int64)
