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
_CAPTURES = re.compile(r"GraphInstantiate")
_REPLAYS = re.compile(r"GraphLaunch|^\(graph\)$")


def stacks_in_graph_capture(frames: Frames, sample: pa.Table) -> Mask:
    """Whether each row of the table of stacks, and one more for unknown ones, is in a function that
    captures graphs again and again."""
    roles = frames.roles
    found: Mask = np.zeros(len(roles.location), bool)
    row = frames.row_of(sample.column("stack_id"))
    captures, replays = (_names_match(sample, rule) for rule in (_CAPTURES, _REPLAYS))
    count: dict[str, int] = defaultdict(int)
    columns = (roles.location[row[captures]], whole(sample, "weight_count")[captures])
    for location, times in zip(*(column.tolist() for column in columns), strict=True):
        if location >= 0:
            count[roles.locations[location].rpartition(":")[0]] += times
    often = sorted((it for it in count if count[it] >= LEAST_BUILDS), key=lambda it: -count[it])
    for function in often[:MOST_BUILDERS]:
        inside = frames.within(function)
        if not inside[row[replays]].any():
            found |= inside
    return found


def _names_match(sample: pa.Table, rule: re.Pattern[str]) -> Mask:
    """Whether the name of each row matches."""
    names = sample.column("name").combine_chunks()
    of_name = [bool(rule.search(name)) for name in names.dictionary.to_pylist()]
    found: Mask = np.array([*of_name, False])[names.indices.to_numpy()]
    return found
