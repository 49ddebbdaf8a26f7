# SPDX-License-Identifier: Apache-2.0
"""Which kind of a cause it is, and the figures that bear it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from sonde.analyze.blame import Blame
from sonde.analyze.causes import NUMBER
from sonde.model.timeline import DeviceKind, Memory, StateKind, Timeline, Way, is_one_of

SMALL_BYTES = 65_536
"""Below this a copy is mostly the cost of asking for it."""
MOST_TOGETHER = 64
"""Devices of one machine that are compared by who comes last to a collective."""
QUOTA_WAIT_NS = 12_000_000
"""Rivals take turns of some milliseconds; a spent quota lasts to the end of its period."""

Detail = tuple[str, list[str]]


def copy(timeline: Timeline, blame: Blame) -> Detail:
    """small, pageable, or bandwidth; from the copies that the device ran."""
    events = blame.stalls.events
    rows = (events.kind == DeviceKind.COPY) & is_one_of(events.way, Way.H2D, Way.D2H, Way.UNKNOWN)
    if not rows.any():
        return "", []
    size, ns = events.bytes[rows], np.maximum(events.duration_ns[rows], 1)
    pageable = float(ns[events.detail[rows] == Memory.PAGEABLE].sum() / ns.sum())
    large = size >= SMALL_BYTES
    facts = [f"{len(size):,} copies, {float(np.median(size)):,.0f} bytes in the median"]
    in_large = float(ns[large].sum()) if large.any() else 0.0
    if in_large < 0.5 * blame.total_ns("copy") and in_large < 0.5 * ns.sum() + 1:
        return "small", facts
    if in_large < 0.25 * blame.total_ns("copy"):
        return "small", facts
    rate = float(size[large].sum() / ns[large].sum())
    facts.append(f"{rate:.1f} GB/s achieved")
    if pageable > 0.5:
        return "pageable", [*facts, f"{100 * pageable:.0f} % of their time from pageable memory"]
    return "bandwidth", facts


def run_queue(timeline: Timeline, blame: Blame) -> Detail:
    """quota or rival: how long the waits for a CPU were."""
    states = timeline.states
    lanes = np.unique(blame.lane[blame.cause == NUMBER["run queue"]])
    rows = (states.kind == StateKind.RUNQUEUE) & np.isin(states.lane, lanes)
    length = states.duration_ns[rows]
    length = length[length >= 100_000]
    if not len(length):
        return "", []
    long_ns = float(length[length >= QUOTA_WAIT_NS].sum())
    waits = f"{len(length):,} waits" if len(length) > 1 else "one wait"
    facts = [f"{waits}, {float(np.median(length)) / 1e6:.1f} ms in the median"]
    return ("quota" if long_ns > 0.6 * length.sum() else "rival"), facts


def gil(timeline: Timeline, blame: Blame) -> Detail:
    """Always gil."""
    return "gil", []


def lock(timeline: Timeline, blame: Blame) -> Detail:
    """Always lock."""
    return "lock", []


def launch(timeline: Timeline, blame: Blame) -> Detail:
    """How many kernels there are, and how short they are."""
    events = blame.stalls.events
    rows = events.kind == DeviceKind.KERNEL
    seconds = max(blame.stalls.window_ns, 1) / 1e9
    mean = float(events.duration_ns[rows].mean()) / 1e3 if rows.any() else 0.0
    return "", [f"{rows.sum() / seconds:,.0f} kernels/s, {mean:.1f} µs each"]


def synchronisation(timeline: Timeline, blame: Blame) -> Detail:
    """How often."""
    count = int((blame.cause == NUMBER["synchronisation"]).sum())
    return "", [f"{count:,} times the device ran dry while a thread waited for it"]


def collective(timeline: Timeline, blame: Blame) -> Detail:
    """How many, how long, and which device comes last to those that several take part in."""
    events = blame.stalls.events
    mine = events.take(events.kind == DeviceKind.COLLECTIVE)
    if not len(mine):
        return "", []
    low, high = np.percentile(mine.duration_ns, (10, 90)) / 1e3
    facts = [f"{len(mine):,} collectives, p10 {low:,.0f} µs, p90 {high:,.0f} µs"]
    whole = timeline.device.take(timeline.device.kind == DeviceKind.COLLECTIVE)
    device_of = timeline.device_of_lane[whole.lane]
    devices = np.unique(device_of)
    if len(devices) > MOST_TOGETHER:
        return "", facts
    begins = [whole.start_ns[device_of == one] for one in devices.tolist()]
    names = [whole.name[device_of == one] for one in devices.tolist()]
    if len(devices) > 1 and all(np.array_equal(names[0], other) for other in names):
        last = np.stack(begins).argmax(axis=0)
        often = np.bincount(last, minlength=len(devices))
        share = 100 * often.max() / len(last)
        facts.append(f"GPU{devices[often.argmax()]} came last to {share:.0f} % of them")
    return "", facts


DETAILS: Mapping[str, Callable[[Timeline, Blame], Detail]] = {
    "copy": copy,
    "run queue": run_queue,
    "gil": gil,
    "lock": lock,
    "collective": collective,
    "launch": launch,
    "synchronisation": synchronisation,
}


def detail_of(key: str, timeline: Timeline, blame: Blame) -> Detail:
    """The detail of a cause and its figures; ('', []) where there is nothing to tell."""
    found = DETAILS.get(key)
    return found(timeline, blame) if found else ("", [])
