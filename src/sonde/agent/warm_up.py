# SPDX-License-Identifier: Apache-2.0
"""The first moments of a recording: stacks are walked and dropped until walks lack no table.

A walk that comes to a process for the first time, or to code whose part of an unwind table is not
loaded yet, is cut there and asks for it; one deep stack may be cut thirty times, once at each
frame. Kept, such stacks would be 1 to 3 % of a short recording.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from sonde.collect.collector import Batch, Collector

LONGEST_S = 0.6
"""The warm-up ends after that in any case."""
QUIET_S = 0.1
"""It ends once no walk lacked anything for this long: ten ticks of the sampling clock."""
GAP_MS = 3
"""Between two readings of what walks ask for."""
LACKING = ("no_process", "table_missing")
"""Stop reasons of walks that lacked something."""


def warm_up(
    walkers: Sequence[Collector],
    poll_events: Callable[[int], None],
    ends: Callable[[], Mapping[str, int]],
) -> list[Batch]:
    """Let started collectors walk stacks. Returns what they have seen until the end of the warm-up,
    which is not to be recorded.

    `poll_events` waits for process events, as many milliseconds at most, and drains them and
    requests of walks; `ends`: walks so far by the name of their stop reason (unwind.stop_reasons).
    """
    began_s = quiet_since_s = now_s = time.monotonic()
    lacked = 0
    while now_s < min(began_s + LONGEST_S, quiet_since_s + QUIET_S):
        poll_events(GAP_MS)
        now_s = time.monotonic()
        ended = ends()
        if (lack := sum(ended.get(name, 0) for name in LACKING)) != lacked:
            lacked, quiet_since_s = lack, now_s
    batches = [collector.drain(time.monotonic_ns(), to_the_end=True) for collector in walkers]
    # What goes on is counted up to here again: the recording begins right after, and drains took
    # a while.
    ongoing = [collector for collector in walkers if collector.reports_ongoing]
    return [*batches, *(it.count_from_now(time.monotonic_ns()) for it in ongoing)]
