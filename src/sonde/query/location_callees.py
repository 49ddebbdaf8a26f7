# SPDX-License-Identifier: Apache-2.0
"""In which machine code of libraries the program's own functions spend their CPU time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.distinct_rows import distinct_rows
from sonde.model.timeline import I64
from sonde.model.user_code import function_of
from sonde.query.columns import Frames, int64_column

LEAST: Final = 0.3
"""Part of a function's CPU time from which on such code is named."""
MOST: Final = 2
PART: Final = 0.01
"""Of all time: code with less is not looked at."""
_INTERPRETER: Final = re.compile(r"^(python3|libpython|node$|libjvm|ruby|php)")
"""Binaries in which the program's own code runs, as it were."""


def callees_of(frames: Frames, sample: pa.Table) -> dict[tuple[int, str], list[tuple[str, float]]]:
    """By process and function of the program ('name file'): the innermost code of libraries in its
    on-CPU samples, 'sgemm_ [libblas.so.3.11.0]', and its part of them (0..1), the largest first.
    Another process may have a function of that name, and another user any."""
    rows = sample.filter(pc.equal(sample.column("kind"), "cpu"))
    row = frames.row_of(rows.column("stack_id"))
    location = frames.roles.location[row].astype(np.int64)
    ns = int64_column(rows, "weight_ns")
    names: dict[str, int] = {}
    of_location = np.full(len(frames.roles.locations) + 1, -1, np.int64)  # and of no location
    for number in _shown(location, ns).tolist():
        name = function_of(frames.roles.locations[number])
        of_location[number] = names.setdefault(name, len(names))
    name_of_row = of_location[location]
    own, of_row = distinct_rows((int64_column(rows, "pid"), name_of_row))
    function = np.where(name_of_row >= 0, of_row, -1)
    shown = function >= 0
    different, inverse = distinct_rows((function[shown], frames.leaves[row[shown]]))
    weights = np.bincount(inverse, ns[shown], len(different))
    wholes = np.bincount(function[shown], ns[shown], len(own))
    times: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (which, leaf), weight in zip(different.tolist(), weights.tolist(), strict=True):
        if weight >= PART * wholes[which]:
            times[which][_name(frames, leaf)] += weight
    of_number = list(names)
    found = {
        (int(own[it, 0]), of_number[own[it, 1]]): _large(each, float(wholes[it]))
        for it, each in times.items()
    }
    return {key: large for key, large in found.items() if large}


def _shown(location: I64, ns: I64) -> I64:
    """The locations that have some of all time: a capture may have very many."""
    known = location >= 0
    weights = np.bincount(location[known], ns[known])
    return np.flatnonzero((weights >= PART * ns.sum()) & (weights > 0))


def _large(times: Mapping[str, float], whole: float) -> list[tuple[str, float]]:
    ranked = sorted(times, key=lambda name: -times[name])
    return [(it, times[it] / whole) for it in ranked if it and times[it] >= LEAST * whole][:MOST]


def _name(frames: Frames, leaf: int) -> str:
    """'' where the code is the program's, the interpreter's or the kernel's."""
    if leaf < 0:
        return ""
    kind, function, binary = frames.code(leaf)
    if kind != "user" or _INTERPRETER.match(binary):
        return ""
    name = f"[{binary}]" if binary and not binary.startswith("[") else binary
    return f"{function} {name}".strip()
