# SPDX-License-Identifier: Apache-2.0
"""In which stretches of time everything that a device ran for a process was timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Windows = npt.NDArray[np.int64]

NEARLY_ALL: Final = 1.1
"""Up to this weight all were chosen; a little more than 1 stands for records that were lost."""
APART: Final = -1
"""In place of a window: chosen one by one, so that what lies before and behind is not known."""
LEAST_RUNS: Final = 8
LEAST_NS: Final = 100_000_000
"""A stretch between runs that stand for several is a window where it is at least so much."""
_BETWEEN: Final = 1 << 32


def window_of(run: pa.Table, lossy_ns: Sequence[tuple[int, int]] = ()) -> Windows:
    """The window of each row of `device_run`: its own; 0 where all of its process was timed; APART.

    Where launches come faster than the budget pays for, for a while or always, those chosen stand
    for several. What lies between two of them is not idle time, but the stretches without such are
    windows like any other, unless some that were chosen were lost then: `lossy_ns`, stretches of
    time. What they stood for is told of by others, which need not be the next.
    """
    window: Windows = run.column("window").to_numpy().astype(np.int64)
    heavy = (run.column("weight").to_numpy() > NEARLY_ALL) & (window <= 0)
    if not heavy.any():
        return window
    pid = run.column("pid").to_numpy()
    start = run.column("start_time_ns").to_numpy().astype(np.int64)
    end = run.column("end_time_ns").to_numpy().astype(np.int64)
    alone = np.isin(pid, np.unique(pid[heavy])) & (window <= 0)
    heavy |= alone & _inside(start, lossy_ns)
    rows = np.flatnonzero(alone)
    rows = rows[np.lexsort((start[rows], pid[rows]))]
    first = np.flatnonzero(np.diff(pid[rows].astype(np.int64), prepend=-1))
    # Stretches are numbered from 0 on within each process, by the heavy runs before them.
    number = np.cumsum(heavy[rows])
    number -= np.repeat(number[first] - heavy[rows[first]], np.diff([*first, len(rows)]))
    light = ~heavy[rows]
    rows, number = rows[light], number[light]
    if len(rows):
        first = np.flatnonzero((np.diff(pid[rows].astype(np.int64), prepend=-1) != 0)
                               | (np.diff(number, prepend=-1) != 0))  # fmt: skip
        length = np.diff([*first, len(rows)])
        lasts = np.maximum.reduceat(end[rows], first) - start[rows[first]] >= LEAST_NS
        lasts &= length >= LEAST_RUNS
        window[rows] = np.where(np.repeat(lasts, length), _BETWEEN + number, APART)
    window[heavy] = APART
    return window


def _inside(times: Windows, stretches: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Whether each time lies behind the begin of a stretch and not behind its end."""
    if not stretches:
        return np.zeros(len(times), bool)
    since, until = np.array(sorted(stretches), np.int64).T
    at = np.searchsorted(since, times, "left") - 1
    reach = np.maximum.accumulate(until)
    found: npt.NDArray[np.bool_] = (at >= 0) & (times <= reach[np.maximum(at, 0)])
    return found


def windows_ns(
    run: pa.Table, window: Windows, start: Windows, end: Windows
) -> list[tuple[int, int]]:
    """From the first to the last run of each window; empty where all was timed.

    `start`, `end`: when the device was in each.
    """
    if not (window > 0).any():
        return []
    keys = run.column("pid").to_numpy().astype(np.int64) << 40 | window
    found, inverse = np.unique(keys, return_inverse=True)
    first = np.full(len(found), np.iinfo(np.int64).max)
    last = np.zeros(len(found), np.int64)
    np.minimum.at(first, inverse, start)
    np.maximum.at(last, inverse, end)
    return sorted(zip(first.tolist(), last.tolist(), strict=True))
