# SPDX-License-Identifier: Apache-2.0
"""Which location in the program called another."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pyarrow as pa

from sonde.query.columns import Frames, int64_column


def callers_of(frames: Frames, sample: pa.Table) -> dict[str, str]:
    """By location: the one that called it for more than half of its time; no entry without one."""
    roles, row = frames.roles, frames.row_of(sample.column("stack_id"))
    # One number for each pair: a capture may have millions of rows.
    base = len(roles.locations) + 1
    pairs = (roles.location[row].astype(np.int64) + 1) * base + roles.caller[row] + 1
    different, inverse = np.unique(pairs, return_inverse=True)
    times = np.bincount(inverse, int64_column(sample, "weight_ns"), len(different))
    by_caller: dict[int, dict[int, float]] = defaultdict(dict)
    for pair, ns in zip(different.tolist(), times.tolist(), strict=True):
        by_caller[pair // base - 1][pair % base - 1] = ns
    found = {}
    for location, callers in by_caller.items():
        main = max(callers, key=lambda one: callers[one])
        if location >= 0 and main >= 0 and 2 * callers[main] > sum(callers.values()):
            found[roles.locations[location]] = roles.locations[main]
    return found
