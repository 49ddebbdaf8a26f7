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
    """The times in an answer of `sonde.query.stored_ranks.ranks`. A rank of which every run was
    timed was idle in the slots without one between its first run and its last."""
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
    """Marks ranks that were timed and ran no collective as not timed; returns how many."""
    seen = np.isfinite(times.work).any(axis=1)
    apart = seen & ~(np.nan_to_num(times.collective).sum(axis=1) > 0)
    times.work[apart] = times.collective[apart] = np.nan
    return int(apart.sum())


def leave_out_thin(times: RankTimes) -> int:
    """Marks ranks that share too few timed slots with others as not timed; returns how many are not
    timed now, those included that were not before."""
    seen = np.isfinite(times.work)
    common = seen & (seen.sum(axis=0) > 1)
    thin = common.sum(axis=1) < LEAST_SLOTS
    times.work[thin] = times.collective[thin] = np.nan
    return int(thin.sum())


def shares(times: RankTimes, rank: int) -> tuple[float, float]:
    """(at work, in collectives) as shares of the slots in which a rank was timed; runs of several
    streams add up."""
    found = []
    for ns in (times.work[rank], times.collective[rank]):
        seen = np.isfinite(ns)
        whole = float(times.slot_ns[seen].sum())
        found.append(round(float(ns[seen].sum()) / whole, 4) if whole else 0.0)
    return found[0], found[1]


def usual_shares(times: RankTimes, excluded: Collection[int]) -> tuple[float, float]:
    """The medians of `shares` over the timed ranks that are not `excluded`."""
    timed = np.flatnonzero(np.isfinite(times.work).any(axis=1)).tolist()
    rest = [shares(times, at) for at in timed if at not in excluded]
    if not rest:
        return 0.0, 0.0
    work, waits = np.median(np.array(rest), axis=0).tolist()
    return work, waits


def slot_s(times: RankTimes) -> tuple[float, float]:
    """(median length of a slot, length of all slots together), s."""
    return float(np.median(times.slot_ns)) / 1e9, float(times.slot_ns.sum()) / 1e9


def pieces_of(columns: Mapping[str, Sequence[Any]], keys: Mapping[Key, int]) -> Pieces | None:
    """The pieces in the columns of `sonde.query.stored_pieces.pieces`; None without any. `keys`:
    rows of ranks."""
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
    """The slow links in the columns of `sonde.query.stored_pieces.exchanges`; None as `slow_links`
    has it. Raises what `check` raises. `keys`: the row of each rank."""
    rank = _numbers(columns, keys)
    check()
    known = rank >= 0
    begin, end = (np.array(columns[name], np.int64)[known] for name in ("begin_ns", "end_ns"))
    return slow_links(rank[known], begin, end, check=check)


def _numbers(columns: Mapping[str, Sequence[Any]], keys: Mapping[Key, int]) -> Any:
    who = zip(*(columns[name] for name in ("node", "pid", "start_ns", "device")), strict=True)
    return np.array([keys.get(one, -1) for one in who], np.int64)
