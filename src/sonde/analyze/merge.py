# SPDX-License-Identifier: Apache-2.0
"""Merges several records of the same time into one timeline.

A profiler's trace has the device and the program's functions; a capture of the machine shows why
threads were off-CPU. They are joined by wall-clock time, threads by their ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from sonde.model.devices import index_of, same_devices
from sonde.model.interner import Interner
from sonde.model.single_runs import no_single_runs
from sonde.model.timeline import (
    I32,
    I64,
    DeviceUse,
    Events,
    Samples,
    StateKind,
    Timeline,
    TrackKind,
    WaitDetail,
    events,
)

_GIL_WAIT_NS = (4_900_000, 5_450_000)
"""Length of waits of one switch interval, 5 ms by default: after it a thread that waits for
Python's interpreter lock requests it. A thread with enough of them waits for that lock, also where
its stacks do not show it."""
_LONGER_NS = 100_000
"""Shorter futex waits are neither counted nor marked."""
_GIL_SHARE = 0.2
"""Of a thread's futex waits from `_LONGER_NS` on: if this share has the length `_GIL_WAIT_NS`, that
is no coincidence."""
_MARGIN_NS = 20_000_000
"""Rows of other records are kept up to this long before and after the first one."""


def grouped(records: Sequence[Timeline]) -> list[list[int]]:
    """The numbers of the records, those that are joined together (`merged`), the one with device
    activity first; groups are in the order of their first record.

    Joined is what adds to a record with device activity, or what another tool recorded, of the same
    time. Two captures that both sum up what threads did are not: sums of two times, or of two
    choices of processes, or the same work twice, are no share of anything.
    """
    groups: list[list[int]] = []
    for number in sorted(range(len(records)), key=lambda it: not len(records[it].device)):
        fits = (one for one in groups if _belongs(records[one[0]], records[number]))
        group = next(fits, None)
        if group is None:
            groups.append([number])
        else:
            group.append(number)
    return sorted(groups, key=min)


def _belongs(one: Timeline, two: Timeline) -> bool:
    """Whether `two` is of the time of `one` and has something that `one` lacks."""
    alike = bool(len(one.device)) == bool(len(two.device))
    if alike and "sonde" in one.sources and "sonde" in two.sources:
        return False
    shift = two.wall_offset_ns - one.wall_offset_ns
    if not one.wall_offset_ns or not two.wall_offset_ns:
        return True  # the time of one of them is not known
    begin, end = two.start_ns + shift, two.end_ns + shift
    return begin < one.end_ns + _MARGIN_NS and end > one.start_ns - _MARGIN_NS


def merged(first: Timeline, *others: Timeline) -> Timeline:
    """`first` with the rows of the others that belong to its processes and its time."""
    result = first
    for other in others:
        result = _merged(result, other)
    return result


def _merged(one: Timeline, two: Timeline) -> Timeline:
    """`one` with the rows of `two` that belong to its processes and its time."""
    interner = Interner()
    for name in one.names:
        interner.name(name)
    for track in one.tracks:
        if track.kind == TrackKind.THREAD:
            interner.thread(track.pid, track.number, track.name, track.process)
        else:
            interner.stream(track.device, track.number, track.pid)
    pids = {track.pid for track in one.tracks if track.kind == TrackKind.THREAD}
    ours = np.array([track.pid in pids for track in two.tracks] or [False])
    shift = two.wall_offset_ns - one.wall_offset_ns
    low, high = one.start_ns - _MARGIN_NS - shift, one.end_ns + _MARGIN_NS - shift
    names: dict[int, int] = {}
    tracks: dict[int, int] = {}

    def number(column: I32, known: dict[int, int], is_track: bool) -> I32:
        """Tracks or names of `two` as numbers of the merged timeline."""
        values, inverse = np.unique(column, return_inverse=True)
        for value in values.tolist():
            if value not in known:
                if is_track:
                    here = two.tracks[value]
                    known[value] = (
                        interner.thread(here.pid, here.number, here.name, here.process)
                        if here.kind == TrackKind.THREAD
                        else interner.stream(here.device, here.number, here.pid)
                    )
                else:
                    known[value] = interner.name(two.names[value])
        return np.array([known[value] for value in values.tolist()] or [0], np.int32)[inverse]

    # A waker is the number of its track plus 1; 0: not known.
    def wakers(column: I32) -> I32:
        column, known = column.copy(), column > 0
        column[known] = number(column[known] - 1, tracks, True) + 1
        return column

    def moved(table: Events) -> Events:
        if not len(table):
            return table
        table = table.take(ours[table.track] & (table.end_ns > low) & (table.start_ns < high))
        return replace(
            table,
            # Longer rows are clipped: a picture of their whole length would be nearly empty.
            start_ns=np.maximum(table.start_ns, low) + shift,
            end_ns=np.minimum(table.end_ns, high) + shift,
            name=number(table.name, names, False),
            track=number(table.track, tracks, True),
            waker=wakers(table.waker),
        )

    samples = two.samples
    rows = ours[samples.track] & (samples.time_ns > low - two.tick_ns) & (samples.time_ns < high)
    joined_samples = Samples(
        time_ns=np.concatenate([one.samples.time_ns, samples.time_ns[rows] + shift]),
        track=np.concatenate([one.samples.track, number(samples.track[rows], tracks, True)]),
        weight_ns=np.concatenate([one.samples.weight_ns, samples.weight_ns[rows]]),
        name=np.concatenate([one.samples.name, number(samples.name[rows], names, False)]),
        fault=np.concatenate([one.samples.fault, samples.fault[rows]]),
    )
    numbers, assumed = _devices(one, two)
    counters = [
        replace(
            counter,
            time_ns=counter.time_ns + shift,
            device=numbers.get(counter.device, counter.device),
        )
        for counter in two.counters
        if counter.device < 0 or not numbers or counter.device in numbers
    ]
    # One record's calls and device rows alone: those of two would count the same work twice.
    calls, device = one.calls, one.device
    if not len(device):
        calls, device = (moved(two.calls) if len(two.calls) else calls), moved(two.device)
    elif not len(calls):  # ids of the other record's calls are not those of these device rows
        calls = moved(two.calls)
        calls = replace(calls, correlation=np.zeros_like(calls.correlation))
    return replace(
        one,
        extent_ns=None,
        totals=(),
        single_runs=no_single_runs(),
        names=interner.names,
        tracks=interner.tracks,
        device=device,
        calls=calls,
        host=_joined(one.host, moved(two.host)),
        states=_joined(one.states, moved(two.states)),
        samples=joined_samples,
        counters=(*one.counters, *counters),
        busy_of=(*one.busy_of, *_uses(two, numbers, shift)),
        gpus_of={**_gpus_of(two, numbers), **one.gpus_of},
        parents={**two.parents, **one.parents},
        programs={**two.programs, **one.programs},
        tick_ns=max(one.tick_ns, two.tick_ns),
        sources=(*one.sources, *two.sources),
        notes=(*one.notes, *two.notes, *assumed),
        beside=one.beside or (two if two.totals and not one.totals else None),
    )


def _uses(two: Timeline, numbers: Mapping[int, int], shift: int) -> Iterator[DeviceUse]:
    """Uses of devices, with the numbers and the clock of the other record."""
    for use in two.busy_of:
        if not numbers or use.device in numbers:
            number = numbers.get(use.device, use.device)
            yield replace(use, time_ns=use.time_ns + shift, device=number)


def _gpus_of(two: Timeline, numbers: Mapping[int, int]) -> dict[int, list[int]]:
    """Devices of processes, with the numbers of the other record."""
    return {
        pid: [numbers.get(device, device) for device in devices if device in numbers or not numbers]
        for pid, devices in two.gpus_of.items()
    }


def _devices(one: Timeline, two: Timeline) -> tuple[dict[int, int], list[str]]:
    """(number in `one` of each device of `two`; notes on assumptions).

    Devices are matched by ids that both records have, else by the GPUs that hold memory of the
    processes of `one`, else by equal numbers, with a note if there are several. Without devices in
    one of the records the result is empty.
    """
    theirs = sorted({counter.device for counter in two.counters if counter.device >= 0})
    ours = sorted({track.device for track in one.tracks if track.device >= 0})
    if not theirs or not ours:
        return {}, []
    if known := same_devices(one.device_ids, two.device_ids):
        return known, []
    pids = {track.pid for track in one.tracks if track.kind == TrackKind.THREAD}
    held = sorted({gpu for pid in pids for gpu in two.gpus_of.get(pid, ())})
    if held or len(theirs) == 1:
        return {gpu: number for number, gpu in index_of(held or theirs, ours).items()}, []
    same = {number: number for number in theirs}
    text = "assumed: GPUs of the machine and of the trace have the same numbers"
    return same, [text]


def _joined(one: Events, two: Events) -> Events:
    if not len(two):
        return one
    if not len(one):
        return two
    return events(
        **{
            column: np.concatenate([getattr(one, column), getattr(two, column)])
            for column in Events.__slots__
        }
    )


def with_interpreter_lock(timeline: Timeline) -> Timeline:
    """The timeline with waits for Python's interpreter lock marked (`WaitDetail.GIL`).

    Waits with whole stacks are marked already. The others are marked by the switch interval: if
    `_GIL_SHARE` of the longer futex waits of a thread, and three at least, last just that long, the
    thread waits for the lock. Then all its futex waits from `_LONGER_NS` up to that length are
    marked: a wait is shorter where the lock is released before the interval is over.
    """
    states = timeline.states
    if not len(states):
        return timeline
    number = next((n for n, name in enumerate(timeline.names) if name == "futex"), -1)
    futex = (states.name == number) & (states.kind == StateKind.BLOCKED)
    length: I64 = states.duration_ns
    low, high = _GIL_WAIT_NS
    ticks = futex & (length >= low) & (length <= high)
    detail = states.wait_detail.copy()
    longer = futex & (length >= _LONGER_NS)
    of_ticks = np.bincount(states.track[ticks])
    of_longer = np.bincount(states.track[longer], minlength=len(of_ticks))[: len(of_ticks)]
    waits_for_lock = of_ticks >= np.maximum(3, _GIL_SHARE * of_longer)
    # One more for tracks behind the last one that has such a wait.
    waits_for_lock = np.append(waits_for_lock, False)
    of_row = waits_for_lock[np.minimum(states.track, len(of_ticks))]
    detail[longer & (length <= high) & of_row] = WaitDetail.GIL
    return replace(timeline, states=replace(states, wait_detail=detail))
