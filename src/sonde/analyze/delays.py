# SPDX-License-Identifier: Apache-2.0
"""What a thread's waits cost a device beyond the moments in which the device stood still.

A thread that waited W would, without that wait, have gone on W earlier. As long as the device
still had work, nothing stood still; but what the thread would have prepared meanwhile is missing
later. So a wait leaves its length as a debt, and the stalls that follow are its doing until they
have paid it; only what is left then is the doing of the code in between.

- A wait for the device itself settles what was owed before it: the device had caught up then.
- A thread that was kept from running (stopped, preempted, blocked) while it waited for the device
  would have waited anyway: that part is not owed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sonde.analyze import intervals as sets
from sonde.analyze.causes import NUMBER
from sonde.analyze.intervals import Intervals
from sonde.model.timeline import F64, I64, U8, Mask

_OF_THE_PROGRAM = {"input", "allocation", "build"}
"""Causes that are to blame also where they wait for the device."""
_LEAST_NS = 2_000
"""Of a wait that is worth its entry."""
_STAGED_NS = 30_000
"""A call that asks for a copy and takes longer does a part of the copying itself."""
_SETTLED, _OWED, _PAID = range(3)


def debts(
    claimed: Sequence[tuple[str, Intervals]],
    waits: Intervals,
    computing: Intervals,
    others_launch: I64,
) -> list[tuple[str, Intervals]]:
    """Each cause and the waits that it owes for.

    `claimed`: the thread's time by cause, disjoint; `waits`: for the device; `computing`: when that
    computed; `others_launch`: when other threads asked the device for work.
    """
    anyway = sets.intersect(waits, computing)
    found = []
    for key, mine in claimed:
        if key == "synchronisation":
            continue
        if key == "lock":  # not where it waited for a thread that fed the device in its place
            first, last = np.searchsorted(others_launch, (mine.start, mine.end))
            mine = Intervals(mine.start[first == last], mine.end[first == last])
        if key == "copy":
            long = mine.end - mine.start >= _STAGED_NS
            owed = sets.subtract(Intervals(mine.start[long], mine.end[long]), anyway)
        else:
            owed = mine if key in _OF_THE_PROGRAM else sets.subtract(mine, anyway)
        found.append((key, owed))
    others = sets.joined(sets.none(), *(owed for _, owed in found))
    return [*found, ("synchronisation", sets.subtract(waits, others))]


def paid(
    owed: Sequence[tuple[str, Intervals]], waits: Intervals, at: I64, duration: I64
) -> tuple[F64, U8, I64]:
    """For each stall (when what ended it had been launched, its length) the share of it that is
    owed, the cause that owes the most of it, and a time in the last wait of that cause."""
    share, cause = np.zeros(len(at)), np.zeros(len(at), np.uint8)
    within = np.full(len(at), -1, np.int64)
    time, amount = [waits.start], [np.zeros(len(waits), np.int64)]
    kind, whose = [np.full(len(waits), _SETTLED, np.int8)], [np.full(len(waits), -1, np.int8)]
    for key, one in owed:
        length = one.end - one.start
        keep = length >= _LEAST_NS
        count = int(keep.sum())
        time.append(one.start[keep])
        amount.append(length[keep])
        kind.append(np.full(count, _OWED, np.int8))
        whose.append(np.full(count, NUMBER[key], np.int8))
    if not any(len(one) for one in amount[1:]):
        return share, cause, within
    time.append(at)
    amount.append(duration)
    kind.append(np.full(len(at), _PAID, np.int8))
    whose.append(np.full(len(at), -1, np.int8))
    times, kinds = np.concatenate(time), np.concatenate(kind)
    order = np.argsort((times - times.min()) * 4 + kinds, kind="stable")
    times, kinds = times[order], kinds[order]
    amounts, owner = np.concatenate(amount)[order], np.concatenate(whose)[order]
    del time, amount, kind, whose  # events come in millions
    # The balance never falls below nothing (a queue's recursion, D. V. Lindley, 1952).
    lent = np.where(kinds == _OWED, amounts, 0)
    settled = np.flatnonzero(kinds == _SETTLED)
    change = lent - np.where(kinds == _PAID, amounts, 0)
    change[settled] = -np.diff(np.cumsum(lent)[settled], prepend=0)  # no more can be owed by then
    run = np.cumsum(change)
    balance = run - np.minimum.accumulate(np.minimum(run, 0))
    before = np.concatenate([[0], balance[:-1]])
    row = np.flatnonzero(kinds == _PAID)
    back = order[row] - (len(order) - len(at))
    available = before[row]
    share[back] = np.minimum(available, duration[back]) / np.maximum(duration[back], 1)

    clear = np.maximum.accumulate(np.where(balance == 0, np.arange(len(order)), -1))
    clear = np.concatenate([[-1], clear[:-1]])[row]
    most = np.zeros(len(row), np.int64)
    for key, _ in owed:
        lent_by = np.cumsum(np.where(owner == NUMBER[key], lent, 0))
        last = np.maximum.accumulate(np.where(owner == NUMBER[key], np.arange(len(order)), 0))[row]
        mine = lent_by[row] - np.where(clear >= 0, lent_by[np.maximum(clear, 0)], 0)
        better = mine > most
        most[better] = mine[better]
        cause[back[better]] = NUMBER[key]
        within[back[better]] = (times[last] + amounts[last] // 2)[better]
    return share, cause, within


def dealt(share: F64) -> Mask:
    """Which of the stalls go to what is owed, so that their number comes out by their shares.

    A stall has one cause; where a part of each is owed, every second or third one goes there.
    """
    sums = np.floor(np.cumsum(share) + 0.5)
    up: Mask = np.diff(sums, prepend=0.0) > 0
    return up
