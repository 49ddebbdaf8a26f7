# SPDX-License-Identifier: Apache-2.0
"""Deferred-wait attribution: stalls that come later than the wait that causes them.

Without a wait of length W, a thread would have launched its later work W earlier. As long as the
device still has work, the wait causes no stall; but the launches behind it come late. So the wait
is deferred: the stalls that follow are attributed to it until their lengths sum to W, oldest wait
first. What remains then is caused by the code in between.

- A wait for the device clears the deferred waits before it: the device had caught up. So does a
  launch that found the device's queue full.
- A thread that had no CPU or was blocked while it also waited for the device would have waited
  anyway: this part is not deferred.
- The part of a wait in which the device copied, ran collectives, or was used by another process is
  a stall already, and is not deferred as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sonde.analyze import intervals as sets
from sonde.analyze.causes import CODE
from sonde.analyze.intervals import Intervals
from sonde.model.causes import Cause
from sonde.model.timeline import F64, I64, U8

_DEFERRED_WHILE_BUSY = {Cause.INPUT, Cause.ALLOCATION, Cause.BUILD}
"""Causes whose time is deferred even while the thread also waits for the device."""
_HANDED_OVER = {Cause.LOCK, Cause.GIL}
"""Waits in which another thread may launch in place of the waiting one."""
_LEAST_NS = 2_000
"""Shorter waits are ignored."""
STAGED_NS = 30_000
"""A call for a copy that takes longer does a part of the copying on the CPU."""
_CLEARS, _DEFERS, _STALLS = range(3)
"""Kinds of entries in the running balance, in the order of entries of one time."""


@dataclass(frozen=True, slots=True)
class DeviceWaits:
    """When a thread waited for the device, and when the device was busy. All within the windows."""

    waits: Intervals
    """Time in calls that wait for the device."""
    cleared: I64
    """Times at which the deferred waits before are cleared: the begins of waits for the device (one
    for those without a launch between them), and of launches that found its queue full."""
    copying: Intervals
    """The part of `waits` in calls that copy."""
    full: Intervals
    """Time in launch calls that found the device's queue full."""
    busy: Intervals
    """When the device ran anything."""
    computing: Intervals
    """When it ran kernels of this program."""


def deferred(
    claimed: Sequence[tuple[Cause, Intervals]], device: DeviceWaits, others_launch: I64
) -> list[tuple[Cause, Intervals]]:
    """The waits of each cause that are deferred.

    `claimed`: the thread's time by cause, disjoint; `others_launch`: when other threads launched.
    """
    anyway = sets.intersect(sets.joined(device.waits, device.full), device.busy)
    stalled = sets.subtract(device.busy, device.computing)
    found = []
    for cause, mine in claimed:
        if cause == Cause.SYNCHRONIZATION:
            continue
        if cause in _HANDED_OVER:  # not waits in which another thread launched
            first, last = np.searchsorted(others_launch, (mine.start, mine.end))
            mine = Intervals(mine.start[first == last], mine.end[first == last])
        if cause == Cause.COPY:
            long = mine.end - mine.start >= STAGED_NS
            staged = sets.subtract(Intervals(mine.start[long], mine.end[long]), anyway)
            # A thread in a copy that waits until it can begin, waits because of the copy.
            waited = sets.subtract(sets.intersect(mine, device.copying), stalled)
            waits = sets.joined(staged, waited)
        else:
            waits = mine if cause in _DEFERRED_WHILE_BUSY else sets.subtract(mine, anyway)
        found.append((cause, waits))
    others = sets.joined(sets.none(), *(waits for _, waits in found))
    waited = sets.subtract(sets.subtract(device.waits, stalled), others)
    return [*found, (Cause.SYNCHRONIZATION, waited)]


@dataclass(frozen=True, slots=True)
class Attribution:
    """Which deferred waits each stall is attributed to.

    All deferred waits are laid end to end; a stall is attributed to the range [low, high) of them.
    """

    low: I64
    """Where the range of each stall begins, in ns of deferred waits."""
    high: I64
    """Where it ends; equal to `low` where no wait is deferred."""
    ends: I64
    """Where each wait ends, in ns of deferred waits: the running sum of their lengths."""
    cause: U8
    """The cause of each wait, as its number."""
    middle_ns: I64
    """The time in the middle of each wait."""

    def causes(self) -> list[int]:
        """Numbers of the causes with deferred waits, the longest sum first."""
        length = np.diff(self.ends, prepend=0)
        sums = np.bincount(self.cause, length, len(CODE))
        return [code for code in np.argsort(-sums, kind="stable").tolist() if sums[code]]

    def amount(self, code: int) -> F64:
        """The part of each stall, in ns, that is attributed to waits of one cause."""
        ends = np.concatenate([[0], self.ends])
        mine = np.where(self.cause == code, np.diff(ends), 0)
        upto = np.concatenate([[0], np.cumsum(mine)])
        part: F64 = np.interp(self.high, ends, upto) - np.interp(self.low, ends, upto)
        return part

    def wait_ns(self, code: int, rows: I64) -> I64:
        """A time in the last wait of one cause that each of these stalls is attributed to."""
        number = np.arange(len(self.cause))
        last = np.maximum.accumulate(np.where(self.cause == code, number, 0))
        at = np.searchsorted(self.ends, self.high[rows], "left")
        times: I64 = self.middle_ns[last[np.minimum(at, len(last) - 1)]]
        return times


def attribute(
    waits: Sequence[tuple[Cause, Intervals]], cleared: I64, launched: I64, duration: I64
) -> Attribution | None:
    """Attributes stalls to deferred waits; None without waits.

    `waits`: as of `deferred`; `cleared`: times at which all waits before are cleared; `launched`:
    when the operation after each stall had been launched; `duration`: the length of each stall.

    A running balance is how much of the waits is still deferred. A wait adds its length, a stall
    takes its own, a clearing takes all; below zero it does not fall. What is left are always the
    newest waits, as the oldest are taken first: with all waits laid end to end, the last `balance`
    ns of those up to now. A stall is attributed to the beginning of that part.
    """
    start, length, causes = [], [], []
    for cause, one in waits:
        long = one.end - one.start
        keep = long >= _LEAST_NS
        start.append(one.start[keep])
        length.append(long[keep])
        causes.append(np.full(int(keep.sum()), CODE[cause], np.uint8))
    begin, lengths = np.concatenate(start), np.concatenate(length)
    if not len(begin):
        return None
    order = np.argsort(begin, kind="stable")
    begin, lengths, codes = begin[order], lengths[order], np.concatenate(causes)[order]
    middle = begin + lengths // 2
    del start, length, causes
    ends = np.cumsum(lengths)
    # All entries of the balance in one order: by time, at one time by kind.
    times = np.concatenate([cleared, begin, launched])
    counts = (len(cleared), len(begin), len(launched))
    kinds = np.repeat(np.array([_CLEARS, _DEFERS, _STALLS], np.int8), counts)
    times -= times.min()
    times *= 4  # room for the three kinds, 0 to 2: one number to sort by, in place of two
    times += kinds
    order = np.argsort(times, kind="stable")
    del times  # here and below: there are millions of entries
    kinds = kinds[order]
    clears, stalls = np.flatnonzero(kinds == _CLEARS), np.flatnonzero(kinds == _STALLS)
    # Of each entry, the length of all waits up to it; and by how much it changes the balance.
    upto = np.concatenate([[0], ends])[np.cumsum(kinds == _DEFERS)]
    del kinds
    change = np.diff(upto, prepend=0)
    back = order[stalls] - (len(order) - len(launched))  # which stall each of these entries is
    change[stalls] = -duration[back]
    # A clearing takes what was deferred since the one before. The balance cannot be larger than
    # that, so it falls to zero.
    change[clears] = -np.diff(upto[clears], prepend=0)
    del order
    # A sum that never falls below zero is the plain sum less its lowest value so far, where that is
    # negative (the recursion of a queue, D. V. Lindley, 1952).
    np.cumsum(change, out=change)
    lowest = np.minimum.accumulate(change)
    np.minimum(lowest, 0, out=lowest)
    change -= lowest  # now the balance after each entry
    before = change[np.maximum(stalls - 1, 0)]
    before[stalls == 0] = 0
    low = np.empty(len(launched), np.int64)
    high = np.empty(len(launched), np.int64)
    low[back] = upto[stalls] - before
    high[back] = low[back] + np.minimum(before, duration[back])
    return Attribution(low, high, ends, codes, middle)


def assign_causes(found: Attribution, rows: I64, duration: I64) -> tuple[U8, I64]:
    """For each of these stalls (the number of its new cause, that of `Cause.UNKNOWN` where it keeps
    its own; a time in the wait that causes it, -1 for none).

    A stall has one cause. Where a part of each stall is attributed to waits, every second or third
    stall gets their cause: stalls are assigned by their lengths, cause by cause, so that the sum of
    a cause is off by at most half of the longest stall.
    """
    cause = np.full(len(rows), CODE[Cause.UNKNOWN], np.uint8)
    wait_ns = np.full(len(rows), -1, np.int64)
    some = np.flatnonzero(found.high[rows] > found.low[rows])
    length = duration[rows[some]]
    order = np.argsort(-length, kind="stable")
    some, length = some[order], length[order]
    rest = np.ones(len(some))  # the share of each stall that is not assigned yet
    for code in found.causes():
        share = found.amount(code)[rows[some]] / length
        part = np.where(rest > 0, np.minimum(share / np.maximum(rest, 1e-9), 1.0), 0.0)
        assigned = np.diff(np.floor(np.cumsum(part) + 0.5), prepend=0.0) > 0
        cause[some[assigned]] = code
        wait_ns[some[assigned]] = found.wait_ns(code, rows[some[assigned]])
        rest -= share
        rest[assigned] = 0.0
    return cause, wait_ns
