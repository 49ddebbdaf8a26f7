# SPDX-License-Identifier: Apache-2.0
"""Which location in the program called another."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pyarrow as pa

from sonde.query.columns import Frames, ThreadTracks, int64_column


def callers_of(
    tracks: ThreadTracks, frames: Frames, sample: pa.Table
) -> tuple[dict[str, str], dict[tuple[int, str], str]]:
    """(by location: the one that called it for more than half of its time; the same by track and
    location, where threads differ).

    A location has no entry in the first where another one called it in some thread: an answer for
    all threads would be wrong for some.
    """
    roles, row = frames.roles, frames.row_of(sample.column("stack_id"))
    # One number for each pair, and each thread: a capture may have millions of rows.
    base = len(roles.locations) + 1
    pairs = (roles.location[row].astype(np.int64) + 1) * base + roles.caller[row] + 1
    different, pair = np.unique(pairs, return_inverse=True)
    threads, thread = np.unique(tracks.of_rows(sample), return_inverse=True)
    in_threads, inverse = np.unique(thread * len(different) + pair, return_inverse=True)
    weights = np.bincount(inverse, int64_column(sample, "weight_ns"), len(in_threads))
    times: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    by_thread: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    for number, ns in zip(in_threads.tolist(), weights.tolist(), strict=True):
        of_thread, which = divmod(number, len(different))
        location, caller = divmod(int(different[which]), base)
        times[location - 1][caller - 1] += ns
        by_thread[of_thread, location - 1][caller - 1] = ns
    of_threads = {key: _main(callers) for key, callers in by_thread.items()}
    mains: dict[int, set[int]] = defaultdict(set)
    for (_, location), main in of_threads.items():
        if main is not None:
            mains[location].add(main)
    found, different_ones = {}, {}
    for location, callers in times.items():
        main = _main(callers)
        if location >= 0 and main is not None and main >= 0 and mains[location] == {main}:
            found[roles.locations[location]] = roles.locations[main]
    for (of_thread, location), main in of_threads.items():
        if location >= 0 and main is not None and main >= 0 and len(mains[location]) > 1:
            key = int(threads[of_thread]), roles.locations[location]
            different_ones[key] = roles.locations[main]
    return found, different_ones


def _main(callers: dict[int, float]) -> int | None:
    """The caller for more than half of the time; None without one."""
    main = max(callers, key=lambda one: callers[one])
    return main if 2 * callers[main] > sum(callers.values()) else None
