# SPDX-License-Identifier: Apache-2.0
"""Stacks of code that captures CUDA graphs again and again (stream capture).

A program that captures a graph warms it up, waits for the device, captures, and instantiates it.
That takes operators, allocations, waits and kernels, which are all part of building the graph, but
only the instantiation can be recognized. So each stack that contains the program's innermost Python
function around that call counts as building; in a program without Python none does. A function that
also replays graphs does not: it is the program's main loop.
"""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np
import pyarrow as pa

from sonde.model.timeline import Mask
from sonde.query.columns import Frames, int64_column

LEAST_BUILDS = 10
"""Graphs that a function builds during a recording, estimated from weighted samples; fewer belong
to the program's start."""
MAX_BUILDERS = 16
"""Functions that are looked for on all stacks: those that build most."""
_INSTANTIATES = re.compile(r"GraphInstantiate")
_REPLAYS = re.compile(r"GraphLaunch|^\(graph\)$")
"""Names of calls that launch a graph, and `(graph)`, the name that a replay has in `sample`."""


def stacks_in_graph_capture(frames: Frames, sample: pa.Table) -> Mask:
    """Whether each row of the table of stacks contains a function that captures graphs again and
    again; one more entry, False, is for unknown stacks."""
    roles = frames.roles
    found: Mask = np.zeros(len(roles.location), bool)
    row = frames.row_of(sample.column("stack_id"))
    instantiates, replays = (_names_match(sample, rule) for rule in (_INSTANTIATES, _REPLAYS))
    count: dict[str, int] = defaultdict(int)
    calls = int64_column(sample, "weight_count")[instantiates].tolist()
    for location, times in zip(roles.location[row[instantiates]].tolist(), calls, strict=True):
        if location >= 0:
            count[roles.locations[location].rpartition(":")[0]] += times
    often = sorted((it for it in count if count[it] >= LEAST_BUILDS), key=lambda it: -count[it])
    for function in often[:MAX_BUILDERS]:
        inside = frames.within(function)
        if not inside[row[replays]].any():
            found |= inside
    return found


def _names_match(sample: pa.Table, rule: re.Pattern[str]) -> Mask:
    """Whether the name of each row matches; a row without a name matches nothing."""
    names = sample.column("name").combine_chunks()
    of_name = [bool(rule.search(name)) for name in names.dictionary.to_pylist()]
    found: Mask = np.array([*of_name, False])[names.indices.to_numpy()]  # the last: index -1
    return found
