# SPDX-License-Identifier: Apache-2.0
"""Several records of one time as one timeline.

A profiler's trace knows the device and the program's own view, a capture of the machine knows why
threads were off their CPU. Joined by the time of day, threads by their ids.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sonde.model.devices import index_of, same_devices
from sonde.model.timeline import (
    I32,
    I64,
    Events,
    Hold,
    Naming,
    Samples,
    StateKind,
    Timeline,
    events,
)

_GIL_WAIT_NS = (4_900_000, 5_450_000)
"""A thread that wants Python's interpreter lock waits for at most its switch interval, 5 ms by
default, and then asks for it: such waits tell the lock even where their stacks do not."""
_GIL_SHARE = 0.2
_MARGIN_NS = 20_000_000


def merged(first: Timeline, *others: Timeline) -> Timeline:
    """`first`, with the rows of the others that concern its processes and its time."""
    result = first
    for other in others:
        result = _merged(result, other)
    return result


def _merged(one: Timeline, two: Timeline) -> Timeline:
    naming = Naming()
    for name in one.names:
        naming.name(name)
    for lane in one.lanes:
        if lane.kind == "thread":
            naming.thread(lane.pid, lane.number, lane.name, lane.process)
        else:
            naming.stream(lane.device, lane.number, lane.pid)
    pids = {lane.pid for lane in one.lanes if lane.kind == "thread"}
    ours = np.array([lane.pid in pids for lane in two.lanes] or [False])
    shift = two.wall_offset_ns - one.wall_offset_ns
    low, high = one.start_ns - _MARGIN_NS - shift, one.end_ns + _MARGIN_NS - shift
    names: dict[int, int] = {}
    lanes: dict[int, int] = {}

    def number(column: I32, known: dict[int, int], lane: bool) -> I32:
        values, inverse = np.unique(column, return_inverse=True)
        for value in values.tolist():
            if value not in known:
                if lane:
                    here = two.lanes[value]
                    known[value] = (
                        naming.thread(here.pid, here.number, here.name, here.process)
                        if here.kind == "thread"
                        else naming.stream(here.device, here.number, here.pid)
                    )
                else:
                    known[value] = naming.name(two.names[value])
        return np.array([known[value] for value in values.tolist()] or [0], np.int32)[inverse]

    def wakers(column: I64) -> I64:
        column, known = column.copy(), column > 0
        column[known] = number((column[known] - 1).astype(np.int32), lanes, True) + 1
        return column

    def moved(table: Events) -> Events:
        if not len(table):
            return table
        waits = table is two.states
        table = table.take(ours[table.lane] & (table.end_ns > low) & (table.start_ns < high))
        return replace(
            table,
            # What lasts far beyond that time would make a picture of it nearly empty.
            start_ns=np.maximum(table.start_ns, low) + shift,
            end_ns=np.minimum(table.end_ns, high) + shift,
            name=number(table.name, names, False),
            lane=number(table.lane, lanes, True),
            correlation=wakers(table.correlation) if waits else table.correlation,
        )

    samples = two.samples
    rows = ours[samples.lane] & (samples.time_ns > low - two.tick_ns) & (samples.time_ns < high)
    joined_samples = Samples(
        time_ns=np.concatenate([one.samples.time_ns, samples.time_ns[rows] + shift]),
        lane=np.concatenate([one.samples.lane, number(samples.lane[rows], lanes, True)]),
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
    calls = one.calls if len(one.calls) else moved(two.calls)
    device = one.device if len(one.device) else moved(two.device)
    return replace(
        one,
        extent_ns=None,
        totals=(),
        names=naming.names,
        lanes=naming.lanes,
        device=device,
        calls=calls,
        host=_joined(one.host, moved(two.host)),
        states=_joined(one.states, moved(two.states)),
        samples=joined_samples,
        counters=(*one.counters, *counters),
        tick_ns=max(one.tick_ns, two.tick_ns),
        sources=(*one.sources, *two.sources),
        notes=(*one.notes, *two.notes, *assumed),
    )


def _devices(one: Timeline, two: Timeline) -> tuple[dict[int, int], list[str]]:
    """(number in `one` of each device of `two`, what had to be assumed).

    By ids that both name; else by which GPUs hold memory of the processes of `one`; else numbers
    are taken for equal, and that is said where there is another to mistake it for. No numbers:
    nothing to join.
    """
    theirs = sorted({counter.device for counter in two.counters if counter.device >= 0})
    ours = sorted({lane.device for lane in one.lanes if lane.device >= 0})
    if not theirs or not ours:
        return {}, []
    if known := same_devices(one.device_ids, two.device_ids):
        return known, []
    pids = {lane.pid for lane in one.lanes if lane.kind == "thread"}
    held = sorted({gpu for pid in pids for gpu in two.gpus_of.get(pid, ())})
    if held or len(theirs) == 1:
        return {gpu: number for number, gpu in index_of(held or theirs, ours).items()}, []
    same = {number: number for number in theirs}
    text = "which GPU of the machine is which of the trace is assumed: by their numbers"
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
    """The timeline with waits for Python's lock told apart from those for other locks.

    By their stacks where those were whole; else by the switch interval: a thread of which a fifth
    of the longer futex waits end after just that long waits for the interpreter.
    """
    states = timeline.states
    if not len(states):
        return timeline
    number = next((n for n, name in enumerate(timeline.names) if name == "futex"), -1)
    futex = (states.name == number) & (states.kind == StateKind.BLOCKED)
    length: I64 = states.duration_ns
    low, high = _GIL_WAIT_NS
    ticks = futex & (length >= low) & (length <= high)
    detail = states.detail.copy()
    for lane in np.unique(states.lane[ticks]):
        mine = futex & (states.lane == lane) & (length >= 100_000)
        if (ticks & mine).sum() >= max(3, _GIL_SHARE * mine.sum()):
            detail[mine & (length <= high)] = Hold.GIL
    return replace(timeline, states=replace(states, detail=detail))
