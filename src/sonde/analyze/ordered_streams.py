# SPDX-License-Identifier: Apache-2.0
"""What the order of streams costs, where single runs were timed: work that could run side by side,
and runs one after another because streams wait for events of others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sonde.analyze.device_waits import RESULT_BYTES
from sonde.analyze.kernels import ALONE
from sonde.analyze.ranking import LEAST_SHARE, UNDERFILLED_BOUND
from sonde.analyze.thread_time import ThreadTime, locations
from sonde.model.causes import Bound
from sonde.model.timeline import CallKind, CopyDirection, Total, TotalKind
from sonde.model.verdict import BoundShare, CodeLocation

LEAST_STREAM_WAITS = 10
"""Fewer waits of streams for events in a record are of its start, not of its steps."""
STREAM_PLACES = 2
"""Places at which streams wait that are named: the one where work forks, and where it joins."""
QUEUED = 0.1
"""Copies whose calls take at most this part of the copies' time are queued: the thread goes on."""


class OrderedWork(NamedTuple):
    """What an order of streams costs."""

    bound: BoundShare
    """Share of the time of the work that runs by itself, and where streams wait."""
    evidence: str


def work_of_second_stream(
    runs: Sequence[Total], calls: Iterable[Total], timed_ns: int, computed: float, time: ThreadTime
) -> OrderedWork | None:
    """The work of the stream with the second most work that runs by itself, where streams wait for
    one another: the stream with the most work waits meanwhile. None where it is small, as where
    work is spread over the many streams of a pool, one after another.

    `computed`: share of the time with any kernel. All of the second stream's work runs by itself
    where streams hardly ever run at the same time. Where they do at times, it is what `computed`
    exceeds the longest stream's work by, and only small kernels count: others fill the device, and
    gain nothing by running at the same time.
    """
    streams = _by_stream(runs)
    whole = sum(streams)
    count, places, where = _stream_waits(calls, time)
    if count < LEAST_STREAM_WAITS or len(streams) < 2:
        return None
    share, how = streams[1] / timed_ns, "hardly ever at the same time"
    if whole > ALONE * timed_ns:
        if _small(runs) < UNDERFILLED_BOUND * whole:
            return None
        share = min(share, computed - streams[0] / timed_ns)
        how = "with none of the first one's beside it"
    if share < LEAST_SHARE:
        return None
    return OrderedWork(
        BoundShare(Bound.DEPENDENCY, share, places),
        f"streams waited for events of other streams {count:,} times{where}; the work of a second "
        f"stream ran for {100 * share:.0f} % of the time, {how}",
    )


def _by_stream(runs: Iterable[Total]) -> list[float]:
    """The kernels' time on each stream of the device with the most, in ns, the longest first.

    Streams that run the same code differ by how often they do: of the few runs that are timed,
    lengths differ more than counts, so each launch counts as long as the mean of both.
    """
    devices: dict[int, list[Total]] = defaultdict(list)
    for one in runs:
        if one.kind == TotalKind.STREAM:
            devices[one.device].append(one)
    mine = max(devices.values(), key=lambda rows: sum(one.ns for one in rows), default=[])
    ns, count = defaultdict[int, int](int), defaultdict[int, int](int)
    code: dict[int, set[tuple[int, str]]] = defaultdict(set)
    for one in mine:
        ns[one.stream] += one.ns
        count[one.stream] += one.count
        code[one.stream].add((one.track, one.location))
    first, *others = sorted(ns, key=lambda stream: -ns[stream]) or [-1]
    found = [float(ns[stream]) for stream in (first, *others)]
    if others and code[first] == code[others[0]] and all(place for _, place in code[first]):
        both, launches = found[0] + found[1], count[first] + count[others[0]]
        found[:2] = [both * count[one] / max(1, launches) for one in (first, others[0])]
    return sorted(found, reverse=True)


def _small(runs: Iterable[Total]) -> int:
    """The time of kernels that leave most of a device idle, in ns."""
    return sum(one.ns for one in runs if one.kind == TotalKind.UNDERFILLED)


def ordered_copies(
    calls: Iterable[Total], exposed: float, window: int, time: ThreadTime
) -> OrderedWork | None:
    """Copies that no kernel overlaps though the program queues them ahead, where streams wait for
    events of others at least once a copy: the order of the streams keeps them from running beside
    kernels. None where such copies are few or small.

    `exposed`: the share of the time with copies that no kernel overlaps; `window`: that time, in
    ns. Copies for which the thread waits in the call are not queued ahead.
    """
    calls = [one for one in calls if one.kind == TotalKind.CALL]
    copies = [one for one in calls if one.call == CallKind.COPY]
    copies = [one for one in copies if one.direction != CopyDirection.D2D]
    copies = [one for one in copies if one.bytes > RESULT_BYTES * one.count]
    asked, inside = sum(one.count for one in copies), sum(one.ns for one in copies)
    count, places, where = _stream_waits(calls, time)
    if exposed < LEAST_SHARE or not asked or count < max(LEAST_STREAM_WAITS, asked):
        return None
    if inside > QUEUED * exposed * window:
        return None
    return OrderedWork(
        BoundShare(Bound.DEPENDENCY, exposed, places),
        f"streams waited for events of other streams {count:,} times{where}, and {asked:,} copies "
        f"that were queued ahead ran for {100 * exposed:.0f} % of the time, with no kernel beside "
        "them: they may wait for kernels that they could run beside",
    )


def _stream_waits(calls: Iterable[Total], time: ThreadTime) -> tuple[int, list[CodeLocation], str]:
    """(waits of streams for events, where the program asks for most of them, the same in words)."""
    waits = [one for one in calls if one.kind == TotalKind.CALL and one.call == CallKind.EVENT]
    count = sum(one.count for one in waits)
    places: dict[str, int] = defaultdict(int)
    for one in waits:
        places[one.location] += one.count
    ranked = [one for one in locations(places, count, time.callers) if one.function]
    ranked = ranked[:STREAM_PLACES]
    where = f", in {' and '.join(one.text for one in ranked)}" * bool(ranked)
    return count, ranked, where
