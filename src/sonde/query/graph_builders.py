# SPDX-License-Identifier: Apache-2.0
"""Stacks of code that captures graphs again and again.

A program that captures a graph warms it up, waits for the device, captures, and instantiates it:
operators, allocations, waits and kernels, which are all part of building it. Only the last call
shows it. So the program's innermost function around that call is looked for, and all stacks that it
is on are building, whatever they call. A function that also replays graphs is none: it is the
program's loop.
"""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np
import pyarrow as pa

from sonde.model.timeline import Mask
from sonde.query.columns import Frames, whole

LEAST_BUILDS = 10
"""Graphs that a function builds within a record; fewer are of the program's start."""
MOST_BUILDERS = 16
"""Functions that are looked for on all stacks, those that build most."""
_BUILDS = re.compile(r"GraphInstantiate")
_REPLAYS = re.compile(r"GraphLaunch|^\(graph\)$")


def building(frames: Frames, sample: pa.Table) -> Mask:
    """Whether each row of the table of stacks, and one more for unknown ones, is building."""
    roles = frames.roles
    none: Mask = np.zeros(len(roles.place), bool)
    names = sample.column("name").combine_chunks()
    numbers = names.indices.to_numpy()
    builds, replays = (
        np.array([*(bool(rule.search(name)) for name in names.dictionary.to_pylist()), False])[
            numbers
        ]
        for rule in (_BUILDS, _REPLAYS)
    )
    row = frames.row_of(sample.column("stack_id"))
    count: dict[str, int] = defaultdict(int)
    columns = (roles.place[row[builds]].tolist(), whole(sample, "weight_count")[builds].tolist())
    for place, times in zip(*columns, strict=True):
        if place >= 0:
            count[roles.places[place].rpartition(":")[0]] += times
    found = none.copy()
    often = sorted((it for it in count if count[it] >= LEAST_BUILDS), key=lambda it: -count[it])
    for function in often[:MOST_BUILDERS]:
        inside = frames.within(function)
        if not inside[row[replays]].any():
            found |= inside
    return found
