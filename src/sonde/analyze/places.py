# SPDX-License-Identifier: Apache-2.0
"""Which code a thread was in: the program's own functions rather than those of libraries."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from sonde.analyze.blame import Blame
from sonde.analyze.causes import NUMBER
from sonde.model.timeline import I64, HostKind, Timeline
from sonde.model.verdict import Place

LOOKED_AT = 48
"""Stalls of a cause whose code is looked at: the longest."""
_DEPTH = 96
_SCAN = 65_536
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

    def __init__(self, timeline: Timeline, lane: int) -> None:
        host = timeline.host
        rows = (host.lane == lane) & (host.kind != HostKind.OPERATOR)
        self._names = timeline.names
        self._start = host.start_ns[rows]
        self._end = host.end_ns[rows]
        self._name = host.name[rows]

    def at(self, time_ns: int) -> list[str]:
        """Innermost first; empty where nothing is known."""
        last = int(np.searchsorted(self._start, time_ns, "right"))
        first = max(0, last - _SCAN)
        covering = np.flatnonzero(self._end[first:last] > time_ns)[-_DEPTH:]
        return [self._names[int(self._name[first + row])] for row in covering[::-1]]


def told(stack: Sequence[str]) -> str:
    """'item() in step train.py:88': the program's innermost function, and what it called."""
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


def places_of(timeline: Timeline, blame: Blame, key: str, lane: int) -> list[Place]:
    """Where the thread was in the longest stalls of a cause, heaviest first."""
    stalls = blame.stalls
    rows = np.flatnonzero((blame.cause == NUMBER[key]) & (blame.lane == lane))
    if not len(rows) or lane < 0:
        return []
    duration: I64 = stalls.duration_ns[rows]
    chosen = rows[np.argsort(-duration, kind="stable")[:LOOKED_AT]]
    stacks = Stacks(timeline, lane)
    weights: dict[str, int] = defaultdict(int)
    for row in chosen.tolist():
        begin, launch = int(stalls.start[row]), int(blame.launch_ns[row])
        at = begin - 500 if key == "synchronisation" else (begin + launch) // 2
        if blame.delayed_ns[row] >= 0:
            at = int(blame.delayed_ns[row])
        weights[told(stacks.at(at))] += int(stalls.end[row]) - begin
    whole = sum(weights.values())
    ranked = sorted(weights.items(), key=lambda item: -item[1])
    return [Place(text, weight / whole) for text, weight in ranked[:4] if text and whole]
