# SPDX-License-Identifier: Apache-2.0
"""Of code that keeps a CPU busy: its lines, and the libraries in which it is there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from sonde.model.timeline import Timeline
from sonde.model.user_code import function_of

FIRST_LINE: Final = 0.75
"""Where a function's first line has less of its time, others are named."""
OTHER_LINE: Final = 0.1
"""A line with less is not."""
MOST_LINES: Final = 4
REFERENCE_BLAS: Final = re.compile(r"\[libblas\.so\.3(\.\d+)*\]$")
"""Netlib's: the files of other implementations have their own names (libopenblasp-r0.3.21.so)."""
FASTER_BLAS: Final = (
    "let it multiply with OpenBLAS or MKL in place of the reference BLAS, many times as fast: "
    "NumPy's wheel has one, on Debian `apt install libopenblas0-pthread`"
)


def callee_facts(timeline: Timeline, pid: int, places: Mapping[str, int]) -> list[str]:
    """A line on the function with the most of this time (ns by place) of a process; none where it
    has nothing to add."""
    functions: dict[str, dict[str, int]] = {}
    for place, ns in places.items():
        functions.setdefault(function_of(place), {})[place] = ns
    function = max(functions, key=lambda one: sum(functions[one].values()), default="")
    if not function:
        return []
    parts = []
    lines = functions[function]
    whole = max(1, sum(lines.values()))
    ranked = sorted(lines, key=lambda one: -lines[one])
    named = [one for one in ranked[:MOST_LINES] if lines[one] >= OTHER_LINE * whole]
    if len(named) > 1 and lines[ranked[0]] < FIRST_LINE * whole:
        shown = (f"{it.rpartition(':')[2]} ({100 * lines[it] / whole:.0f} %)" for it in named)
        parts.append(f"in lines {', '.join(shown)}")
    callees = timeline.callees.get((pid, function), ())
    if callees:
        shown = (f"{100 * share:.0f} % in {name}" for name, share in callees)
        parts.append(f"of its CPU time {', '.join(shown)}")
    return [f"{function}: {'; '.join(parts)}"] if parts else []


def on_reference_blas(timeline: Timeline, pid: int, function: str) -> bool:
    """Whether a function of a process spends its time in the reference implementation of BLAS."""
    callees = timeline.callees.get((pid, function), ())
    return bool(callees) and REFERENCE_BLAS.search(callees[0][0]) is not None
