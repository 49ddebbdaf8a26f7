# SPDX-License-Identifier: Apache-2.0
"""Which code runs within the functions that take a lock: what the lock may be held for."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from sonde.model.timeline import Total, WaitDetail
from sonde.query.columns import Frames, int64_column

MAX_FUNCTIONS = 16
"""Functions that take locks that are looked at: those whose locks are waited for longest."""
_LINE = re.compile(r"^(.+ .+):\d+$")


def places_within(
    frames: Frames, sample: pa.Table, totals: Iterable[Total]
) -> dict[str, frozenset[str]]:
    """By function of the program that waits for a lock it takes ('name file', or a function of
    machine code): the locations of which most of the time is in calls of that function. Its own
    lines are among them."""
    waited: dict[str, int] = defaultdict(int)
    for one in totals:
        if one.wait_detail == WaitDetail.OWN_LOCK and one.location:
            waited[_without_line(one.location)] += one.ns
    if not waited:
        return {}
    roles, row = frames.roles, frames.row_of(sample.column("stack_id"))
    location = roles.location[row].astype(np.int64) + 1
    ns = int64_column(sample, "weight_ns")
    all_ns = np.bincount(location, ns, len(roles.locations) + 1)
    ranked = sorted(waited, key=lambda function: -waited[function])[:MAX_FUNCTIONS]
    found = {}
    for function, stacks in zip(ranked, frames.holding_each(ranked), strict=True):
        inside = stacks[row]
        inside_ns = np.bincount(location[inside], ns[inside], len(all_ns))
        most = np.flatnonzero(2 * inside_ns > all_ns).tolist()
        found[function] = frozenset(roles.locations[one - 1] for one in most if one)
    return found


def _without_line(place: str) -> str:
    found = _LINE.match(place)
    return found[1] if found else place
