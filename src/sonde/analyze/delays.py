# SPDX-License-Identifier: Apache-2.0
"""What a thread's waits cost a device beyond the moments in which the device stood still.

A thread that waited W would, without that wait, have gone on W earlier. As long as the device
still had work, nothing stood still; but what the thread would have prepared meanwhile is missing
later. So a wait leaves its length as a debt, and the stalls that follow are its doing until they
have paid it, the oldest debt first; only what is left then is the doing of the code in between.

- A wait for the device itself settles what was owed before it: the device had caught up then. So
  does a launch that found the device's queue full.
- A thread that was kept from running (stopped, preempted, blocked) while it waited for the device
  would have waited anyway: that part is not owed.
- A wait that lasted as long as the device copied, or waited for other devices, or was a rival's,
  has its cost there: those are stalls of their own, and it is not owed a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sonde.analyze import intervals as sets
from sonde.analyze.causes import NUMBER
from sonde.analyze.intervals import Intervals
from sonde.model.timeline import F64, I64, U8

_OF_THE_PROGRAM = {"input", "allocation", "build"}
"""Causes that are to blame also where they wait for the device."""
_HANDED_OVER = {"lock", "gil"}
"""What a thread waits for while another may feed the device in its place."""
_LEAST_NS = 2_000
"""Of a wait that is worth its entry."""
STAGED_NS = 30_000
"""A call that asks for a copy and takes longer does a part of the copying itself."""
_SETTLED, _OWED, _PAID = range(3)


@dataclass(frozen=True, slots=True)
class DeviceWaits:
    """Where a thread waited for the device, and what that did."""

    waits: Intervals
    """In calls that wait for it."""
    settled: I64
    """When what was owed until then was settled: where it began to wait."""
    copying: Intervals
    """Those of them that copy."""
    full: Intervals
    """In calls that found its queue full."""
    busy: Intervals
    """When the device had anything to do, whoever waits for it."""
    computing: Intervals
    """When it ran kernels of this program; where it was busy otherwise, that is a stall."""


def debts(
    claimed: Sequence[tuple[str, Intervals]], device: DeviceWaits, others_launch: I64
) -> list[tuple[str, Intervals]]:
    """Each cause and the waits that it owes for.

    `claimed`: the thread's time by cause, disjoint; `others_launch`: when other threads asked the
    device for work.
    """
    anyway = sets.intersect(sets.joined(device.waits, device.full), device.busy)
    stalled = sets.subtract(device.busy, device.computing)
    found = []
    for key, mine in claimed:
        if key == "synchronisation":
            continue
        if key in _HANDED_OVER:  # not where it waited for a thread that fed the device meanwhile
            first, last = np.searchsorted(others_launch, (mine.start, mine.end))
            mine = Intervals(mine.start[first == last], mine.end[first == last])
        if key == "copy":
            long = mine.end - mine.start >= STAGED_NS
            staged = sets.subtract(Intervals(mine.start[long], mine.end[long]), anyway)
            # What the copy waited for before it could begin, the thread waited for by copying.
            waited = sets.subtract(sets.intersect(mine, device.copying), stalled)
            owed = sets.joined(staged, waited)
        else:
            owed = mine if key in _OF_THE_PROGRAM else sets.subtract(mine, anyway)
        found.append((key, owed))
    others = sets.joined(sets.none(), *(owed for _, owed in found))
    waited = sets.subtract(sets.subtract(device.waits, stalled), others)
    return [*found, ("synchronisation", waited)]


@dataclass(frozen=True, slots=True)
class Paid:
    """What stalls have paid, as stretches of all that was lent, laid end to end."""

    low: I64
    high: I64
    """Of each stall; the same as `low` where it paid nothing."""
    lent: I64
    """Where each debt ends in what was lent."""
    owner: U8
    """The cause that owes it."""
    middle: I64
    """A time in the wait that left it."""

    def causes(self) -> list[int]:
        """The causes that owe anything, those that owe the most first."""
        amount = np.diff(self.lent, prepend=0)
        sums = np.bincount(self.owner, amount, len(NUMBER))
        return [key for key in np.argsort(-sums, kind="stable").tolist() if sums[key]]

    def amount(self, key: int) -> F64:
        """What each stall paid for a cause."""
        ends = np.concatenate([[0], self.lent])
        mine = np.where(self.owner == key, np.diff(ends), 0)
        upto = np.concatenate([[0], np.cumsum(mine)])
        paid: F64 = np.interp(self.high, ends, upto) - np.interp(self.low, ends, upto)
        return paid

    def within(self, key: int, rows: I64) -> I64:
        """A time in the last wait that each of these stalls, which paid for a cause, paid for."""
        number = np.arange(len(self.owner))
        last = np.maximum.accumulate(np.where(self.owner == key, number, 0))
        at = np.searchsorted(self.lent, self.high[rows], "left")
        times: I64 = self.middle[last[np.minimum(at, len(last) - 1)]]
        return times


def paid(
    owed: Sequence[tuple[str, Intervals]], settled: I64, at: I64, duration: I64
) -> Paid | None:
    """What each stall pays, by when what ended it had been launched, and its length.

    `settled`: when what was owed until then was. None where nothing is owed.
    """
    start, length, owner = [], [], []
    for key, one in owed:
        long = one.end - one.start
        keep = long >= _LEAST_NS
        start.append(one.start[keep])
        length.append(long[keep])
        owner.append(np.full(int(keep.sum()), NUMBER[key], np.uint8))
    begin, lent = np.concatenate(start), np.concatenate(length)
    if not len(begin):
        return None
    order = np.argsort(begin, kind="stable")
    begin, lent, owners = begin[order], lent[order], np.concatenate(owner)[order]
    middle = begin + lent // 2
    del start, length, owner
    ends = np.cumsum(lent)
    # The balance never falls below nothing (a queue's recursion, D. V. Lindley, 1952).
    times = np.concatenate([settled, begin, at])
    counts = (len(settled), len(begin), len(at))
    kinds = np.repeat(np.array([_SETTLED, _OWED, _PAID], np.int8), counts)
    times -= times.min()
    times *= 4
    times += kinds
    order = np.argsort(times, kind="stable")  # events come in millions
    del times
    kinds = kinds[order]
    settles, pays = np.flatnonzero(kinds == _SETTLED), np.flatnonzero(kinds == _PAID)
    upto = np.concatenate([[0], ends])[np.cumsum(kinds == _OWED)]
    del kinds
    change = np.diff(upto, prepend=0)
    back = order[pays] - (len(order) - len(at))
    change[pays] = -duration[back]
    change[settles] = -np.diff(upto[settles], prepend=0)  # no more can be owed by then
    del order
    np.cumsum(change, out=change)
    lowest = np.minimum.accumulate(change)
    np.minimum(lowest, 0, out=lowest)
    change -= lowest
    before = change[np.maximum(pays - 1, 0)]
    before[pays == 0] = 0
    low = np.empty(len(at), np.int64)
    high = np.empty(len(at), np.int64)
    low[back] = upto[pays] - before
    high[back] = low[back] + np.minimum(before, duration[back])
    return Paid(low, high, ends, owners, middle)


def dealt(found: Paid, rows: I64, duration: I64) -> tuple[U8, I64]:
    """For each of these stalls the cause that it goes to, as what is owed (its number, or that of
    'unknown' where it stays what it is), and a time in the wait that is to blame, -1.

    A stall has one cause; where a part of each is owed, every second or third goes there. They are
    dealt by their lengths, cause by cause, so that the sum is off by half of the longest at most.
    """
    cause = np.full(len(rows), NUMBER["unknown"], np.uint8)
    within = np.full(len(rows), -1, np.int64)
    some = np.flatnonzero(found.high[rows] > found.low[rows])
    length = duration[rows[some]]
    order = np.argsort(-length, kind="stable")
    some, length = some[order], length[order]
    rest = np.ones(len(some))  # of each, not yet dealt to a cause
    for key in found.causes():
        share = found.amount(key)[rows[some]] / length
        part = np.where(rest > 0, np.minimum(share / np.maximum(rest, 1e-9), 1.0), 0.0)
        up = np.diff(np.floor(np.cumsum(part) + 0.5), prepend=0.0) > 0
        cause[some[up]] = key
        within[some[up]] = found.within(key, rows[some[up]])
        rest -= share
        rest[up] = 0.0
    return cause, within
