# SPDX-License-Identifier: Apache-2.0
"""The first moments: walks run, and nothing is kept until they lack nothing.

A walk that meets a process for the first time, or code whose part of a table is not loaded yet,
is cut there and asks for it; one deep stack may so be cut thirty times, once for each frame. Kept,
these are the 1 to 3 % of a short recording's stacks that end early.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from sonde.collect.collector import Batch, Collector

LONGEST_S = 0.6
QUIET_S = 0.1
"""Over once no walk lacked anything for so long: ten ticks of the sampling clock."""
GAP_MS = 3
"""Between two looks at what walks ask for."""
LACKING = ("no_process", "table_missing")


def warm_up(
    walkers: Sequence[Collector],
    poll_events: Callable[[int], None],
    ends: Callable[[], Mapping[str, int]],
) -> list[Batch]:
    """Let started collectors walk; then what they have seen, up to now, which counts for nothing.

    `poll_events` drains process events and requests of walks, within as many milliseconds; `ends`:
    how walks ended so far, by name (unwind.stop_reasons).
    """
    began_s = quiet_since_s = now_s = time.monotonic()
    lacked = 0
    while now_s < min(began_s + LONGEST_S, quiet_since_s + QUIET_S):
        poll_events(GAP_MS)
        now_s = time.monotonic()
        ended = ends()
        if (lack := sum(ended.get(name, 0) for name in LACKING)) != lacked:
            lacked, quiet_since_s = lack, now_s
    return [collector.drain(time.monotonic_ns(), to_the_end=True) for collector in walkers]
