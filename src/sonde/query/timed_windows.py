# SPDX-License-Identifier: Apache-2.0
"""Windows of time in which every run on a device for a process was timed.

Outside of them the recorder times a random sample of the runs, each with a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Windows = npt.NDArray[np.int64]

NEARLY_ALL: Final = 1.1
"""Up to this weight a run counts as one of which all were timed: a little more than 1 stands for
lost records."""
SINGLE: Final = -1
"""In place of a window number: the run was sampled singly, its neighbours were not timed."""
LEAST_RUNS: Final = 8
LEAST_NS: Final = 100_000_000
"""Runs between two weighted runs are a window if they are at least this many and take this long."""
_BETWEEN: Final = 1 << 32
"""Added to the numbers of such windows, so that they differ from those that the recorder gave."""


def window_of(run: pa.Table, lossy_ns: Sequence[tuple[int, int]] = ()) -> Windows:
    """The window number of each row of `device_run`.

    It is 0 where every run of the process was timed, and SINGLE for a run that was sampled.

    Where launches come faster than the overhead budget allows, the sampled ones have a weight above
    1, and the device is not idle between two of them. A part of the recording without such runs is
    a window, too, unless records were lost in it (`lossy_ns`: intervals of time): the weight of
    lost runs is added to later ones, not always to the next.
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
    # Runs between the same two weighted runs of a process have the same number.
    number = np.cumsum(heavy[rows])
    number -= np.repeat(number[first] - heavy[rows[first]], np.diff([*first, len(rows)]))
    light = ~heavy[rows]
    rows, number = rows[light], number[light]
    if len(rows):
        first = np.flatnonzero((np.diff(pid[rows].astype(np.int64), prepend=-1) != 0)
                               | (np.diff(number, prepend=-1) != 0))  # fmt: skip
        length = np.diff([*first, len(rows)])
        is_window = np.maximum.reduceat(end[rows], first) - start[rows[first]] >= LEAST_NS
        is_window &= length >= LEAST_RUNS
        window[rows] = np.where(np.repeat(is_window, length), _BETWEEN + number, SINGLE)
    window[heavy] = SINGLE
    return window


def _inside(times: Windows, intervals: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Whether each time is in one of the intervals, whose starts are exclusive."""
    if not intervals:
        return np.zeros(len(times), bool)
    since, until = np.array(sorted(intervals), np.int64).T
    at = np.searchsorted(since, times, "left") - 1
    reach = np.maximum.accumulate(until)
    found: npt.NDArray[np.bool_] = (at >= 0) & (times <= reach[np.maximum(at, 0)])
    return found


def windows_ns(
    run: pa.Table, window: Windows, start: Windows, end: Windows
) -> list[tuple[int, int]]:
    """(start, end) of each window, from its first run to its last; empty where all runs of all
    processes were timed.

    `start`, `end`: times of each run on the device, in ns.
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
