# SPDX-License-Identifier: Apache-2.0
"""Totals of threads and of their runs on devices, for what is not recorded interval by interval."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import pyarrow as pa

from sonde.model.serving import ACCEPT_CALLS, ACCEPTS
from sonde.model.timeline import CallKind, CopyDirection, Mask, Total, TotalKind, WaitDetail
from sonde.query.columns import Frames, ThreadTracks
from sonde.query.device_kinds import CALL_KIND_OF_OPERATION, DIRECTIONS
from sonde.query.graph_builders import stacks_in_graph_capture
from sonde.query.run_totals import run_totals
from sonde.query.sample_totals import sample_totals
from sonde.query.wait_parts import PartsKey, WaitPart, parts_of_run_queue, parts_of_waits

MAX_WAKERS = 8
"""Threads by which the waits of one thread for one reason are split where no stack was taken: those
that ended most."""
TIMER_KNOWN_NS = 1_000_000
"""Of waits that are shorter in the mean, what ended them is not always noted: 0 may be a thread."""
RARELY_ENDED = 0.05
"""Where other threads end less than this share of the waits at a place, a timer ends them."""
_TOTAL_KINDS = {
    "blocked": TotalKind.BLOCKED,
    "runqueue": TotalKind.RUNQUEUE,
    "device": TotalKind.CALL,
}
"""By kind of row of `activity`; rows of other kinds are not read."""


class _Key(NamedTuple):
    """What rows of `activity` that are summed have in common."""

    track: int
    kind: str
    name: str
    operation: str
    direction: str


class _Amounts(NamedTuple):
    """What a total sums up."""

    ns: int
    times: int
    bytes: int

    def share(self, part: float) -> _Amounts:
        """A part of them, 0 to 1."""
        return _Amounts(*(round(one * part) for one in self))

    def at_most(self, limit: _Amounts) -> _Amounts:
        """The lesser of each."""
        return _Amounts(*map(min, self, limit))

    def without(self, part: _Amounts) -> _Amounts:
        """What is left of each."""
        return _Amounts(*(one - other for one, other in zip(self, part, strict=True)))


class _OfWaker(NamedTuple):
    """The sum of rows whose last wait one thread ended."""

    amounts: _Amounts
    waker_tid: int
    """0: none is known."""


def totals_of(
    tracks: ThreadTracks,
    frames: Frames,
    tables: Mapping[str, pa.Table],
    run: pa.Table,
    *,
    span: tuple[int, int],
    tick_ns: int,
    shared: Collection[int],
) -> list[Total]:
    """All totals.

    `run`: rows of `device_run` that were sampled one by one; `span`: start and end of the recording
    in ns; `tick_ns`: the interval that one sample sums up; `shared`: processes whose devices
    another process used, too.
    """
    sample = tables["sample"]
    in_capture = stacks_in_graph_capture(frames, sample)
    return [
        *_waits_and_calls(tracks, frames, tables, in_capture),
        *sample_totals(tracks, frames, sample, in_capture=in_capture, span=span, tick_ns=tick_ns),
        *run_totals(tracks, frames, run, in_capture=in_capture, shared=shared),
    ]


def _waits_and_calls(
    tracks: ThreadTracks, frames: Frames, tables: Mapping[str, pa.Table], in_capture: Mask
) -> list[Total]:
    activity = tables["activity"]
    parts = parts_of_waits(tracks, frames, tables["sample"], activity, in_capture)
    parts |= parts_of_run_queue(tracks, frames, tables["sample"])
    totals: list[Total] = []
    for key, group in _groups(tracks, activity).items():
        call = CallKind.OTHER
        if key.kind == "device":
            is_event = "StreamWaitEvent" in key.name
            call = CallKind.EVENT if is_event else CALL_KIND_OF_OPERATION.get(key.operation, call)
        sums = _Amounts(*map(sum, zip(*(one.amounts for one in group), strict=True)))
        total = Total(
            key.track,
            _TOTAL_KINDS[key.kind],
            key.name,
            call,
            ns=sums.ns,
            count=sums.times,
            bytes=sums.bytes,
            direction=DIRECTIONS.get(key.direction, CopyDirection.UNKNOWN),
            serves=key.operation in ACCEPT_CALLS,
            service=ACCEPTS if key.operation in ACCEPT_CALLS else "",
        )
        known = parts.get(PartsKey(key.track, key.kind, key.name)) or _by_waker(group, sums.ns)
        totals += _split(tracks, total, known, longest=max(group))
    return totals


def _groups(tracks: ThreadTracks, activity: pa.Table) -> dict[_Key, list[_OfWaker]]:
    """Rows of `activity` summed by key and by the thread that ended the waits."""
    texts: dict[str, list[str]] = {}
    names = ("kind", "name", "op", "direction")
    keys = ["pid", "tid", "waker_tid", *names]
    encoded = activity.select([*keys, "ns", "count", "bytes"])
    for name in names:  # by dictionary index: a text may be long
        column = encoded.column(name).combine_chunks()
        texts[name] = column.dictionary.to_pylist()
        encoded = encoded.set_column(encoded.schema.get_field_index(name), name, column.indices)
    rows = encoded.group_by(keys).aggregate([("ns", "sum"), ("count", "sum"), ("bytes", "sum")])
    if not rows.num_rows:
        return {}
    named = (map(texts[name].__getitem__, rows.column(name).to_pylist()) for name in names)
    sums = (rows.column(f"{name}_sum").to_pylist() for name in ("ns", "count", "bytes"))
    found: dict[_Key, list[_OfWaker]] = {}
    for key, amounts, waker_tid in zip(
        map(_Key, tracks.of_rows(rows).tolist(), *named),
        map(_Amounts, *sums),
        rows.column("waker_tid").to_pylist(),
        strict=True,
    ):
        if key.kind in _TOTAL_KINDS:
            found.setdefault(key, []).append(_OfWaker(amounts, waker_tid))
    return found


def _by_waker(group: Sequence[_OfWaker], all_ns: int) -> dict[WaitPart, float]:
    """The share of the waits that each thread ended, for waits without stacks."""
    ranked = sorted(group, reverse=True)[:MAX_WAKERS]
    if not all_ns or not any(one.waker_tid for one in ranked):
        return {}
    return {WaitPart(WaitDetail.NONE, "", one.waker_tid): one.amounts.ns / all_ns for one in ranked}


def _timed_out(parts: Mapping[WaitPart, float]) -> set[str]:
    """Places where timers end all waits but a few."""
    shares: dict[str, tuple[float, float]] = {}
    for part, share in parts.items():
        by_timer, other = shares.get(part.location, (0.0, 0.0))
        is_timer = not part.waker_tid
        shares[part.location] = (by_timer + share * is_timer, other + share * (not is_timer))
    return {
        place for place, (by_timer, other) in shares.items()
        if place and by_timer and other <= RARELY_ENDED * (by_timer + other)
    }  # fmt: skip


def _split(
    tracks: ThreadTracks, total: Total, parts: Mapping[WaitPart, float], *, longest: _OfWaker
) -> list[Total]:
    """The total, split by the shares of `parts`; what remains has no detail.

    `longest`: the sum of the thread that ended most of the waits; it stands for the waker of parts
    of which none is known.
    """
    made = []
    amounts = left = _Amounts(total.ns, total.count, total.bytes)
    share_of_longest = longest.amounts.ns / max(1, total.ns)
    by_none = longest.amounts if not longest.waker_tid else _Amounts(0, 1, 0)
    is_known = by_none.ns >= TIMER_KNOWN_NS * max(1, by_none.times)
    timed_out = _timed_out(parts) if is_known else set()
    for part, share in parts.items():
        mine = amounts.share(share).at_most(left)
        left = left.without(mine)
        is_known = part.waker_tid >= 0
        tid = part.waker_tid if is_known else longest.waker_tid
        made.append(
            replace(
                total,
                ns=mine.ns,
                count=mine.times,
                bytes=mine.bytes,
                wait_detail=part.detail,
                location=part.location,
                serves=part.serves or total.serves,
                service=part.service or total.service,
                entry=part.entry,
                pool=part.pool,
                waker=tracks.comm(tid),
                waker_track=tracks.of_tid(tid),
                waker_ns=round(mine.ns * (1.0 if is_known else share_of_longest)) if tid else 0,
                timed_out=part.location in timed_out and not part.waker_tid,
            )
        )
    if left.ns or left.times or not made:
        made.append(replace(total, ns=left.ns, count=left.times, bytes=left.bytes))
    return made
