# SPDX-License-Identifier: Apache-2.0
"""The program's own code that a thread executed in stalls of one cause."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from sonde.analyze.blamed_stalls import BlamedStalls
from sonde.analyze.causes import CODE
from sonde.model.causes import Cause
from sonde.model.timeline import I64, HostKind, Timeline
from sonde.model.verdict import CodeLocation

SAMPLED_STALLS = 48
"""This many of the longest stalls of a cause are sampled."""
_DEPTH = 96
"""Frames of a stack, the innermost ones."""
_SCAN = 65_536
"""Function events before a time that may still be open at it."""
_FRAME = re.compile(r"^(?P<file>[^()]*)\((?P<line>\d+)\): (?P<function>.*)$")
_BUILTIN = re.compile(r"^<built-in (?:method|function) (?P<name>\w+)")
_LIBRARY = re.compile(
    r"^(<|torch/|triton/|jax/|jaxlib/|numpy/|tensorflow/|nvidia/|transformers/|accelerate/"
    r"|lightning|pytorch_lightning/|(threading|queue|selectors|socket|contextlib|functools|random"
    r"|connection|runpy|subprocess|tempfile|codecs|typing|copy|enum|collections|pickle)\.py)"
)
_ENTRIES = {"<module>", "main", "_run_code", "_run_module_as_main"}


class Stacks:
    """The Python stack of a thread at any time, from its function events."""

    def __init__(self, timeline: Timeline, track: int) -> None:
        host = timeline.host
        rows = (host.track == track) & (host.kind != HostKind.OPERATOR)
        self._names = timeline.names
        self._start = host.start_ns[rows]
        self._end = host.end_ns[rows]
        self._name = host.name[rows]

    def at(self, time_ns: int) -> list[str]:
        """The names on the stack at a time, innermost first; empty where unknown."""
        last = int(np.searchsorted(self._start, time_ns, "right"))
        first = max(0, last - _SCAN)
        covering = np.flatnonzero(self._end[first:last] > time_ns)[-_DEPTH:]
        return [self._names[int(self._name[first + row])] for row in covering[::-1]]


def describe(stack: Sequence[str]) -> str:
    """The program's innermost function, and the built-in it called: 'item() in step train.py:88'.

    '' where only libraries are on the stack.
    """
    own = next((name for name in stack if _own(name)), "")
    if not own:
        return ""
    frame = _FRAME.match(own)
    where = f"{frame['function']} {frame['file']}:{frame['line']}" if frame else own
    leaf = _BUILTIN.match(stack[0])
    return f"{leaf['name']}() in {where}" if leaf else where


def _own(name: str) -> bool:
    frame = _FRAME.match(name)
    if not frame or _LIBRARY.match(name):
        return False
    return frame["function"] not in _ENTRIES


def code_locations_of(
    timeline: Timeline, blame: BlamedStalls, cause: Cause, track: int
) -> list[CodeLocation]:
    """Code of a thread in the longest stalls of a cause, the largest share first."""
    stalls = blame.stalls
    rows = np.flatnonzero((blame.cause == CODE[cause]) & (blame.track == track))
    if not len(rows) or track < 0:
        return []
    duration: I64 = stalls.duration_ns[rows]
    chosen = rows[np.argsort(-duration, kind="stable")[:SAMPLED_STALLS]]
    stacks = Stacks(timeline, track)
    weights: dict[str, int] = defaultdict(int)
    for row in chosen.tolist():
        begin, launch = int(stalls.start[row]), int(blame.launch_ns[row])
        at = begin - 500 if cause == Cause.SYNCHRONIZATION else (begin + launch) // 2
        if blame.earlier_wait_ns[row] >= 0:
            at = int(blame.earlier_wait_ns[row])
        weights[describe(stacks.at(at))] += int(stalls.end[row]) - begin
    whole = sum(weights.values())
    ranked = sorted(weights.items(), key=lambda item: -item[1])
    return [CodeLocation(text, weight / whole) for text, weight in ranked[:4] if text and whole]
