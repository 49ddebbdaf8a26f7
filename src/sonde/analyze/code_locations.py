# SPDX-License-Identifier: Apache-2.0
"""The program's own code that a thread executed in stalls of one cause.

It needs a timeline with functions, so a trace (torch.profiler): a capture of the machine has none.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from sonde.analyze.blamed_stalls import BlamedStalls
from sonde.analyze.causes import CODE
from sonde.analyze.launch_path import kind_of_frame
from sonde.model.causes import Cause
from sonde.model.libraries import CodeKind
from sonde.model.timeline import I64, HostKind, Timeline
from sonde.model.verdict import CodeLocation

SAMPLED_STALLS = 48
"""This many of the longest stalls of a cause are sampled."""
MAX_LOCATIONS = 4
"""Places in code that are named of one cause and thread."""
_BEFORE_NS = 500
"""A stall by synchronization begins when the device has done what the thread waits for. This long
before, the thread is still in the call that waits."""
_DEPTH = 96
"""At most this many frames of a stack are taken, the innermost ones."""
_SCAN = 65_536
"""At most this many function events before a time are searched. A function is not found at a time
if this many others began in between."""
_FRAME = re.compile(r"^(?P<file>[^()]*)\((?P<line>\d+)\): (?P<function>.*)$")
_BUILTIN = re.compile(r"^<built-in (?:method|function) (?P<name>\w+)")
_ENTRIES = {"<module>", "main", "_run_code", "_run_module_as_main"}
"""Entry points: named only where no other function of the program is on the stack."""


class TraceStacks:
    """The functions and ranges of a thread at any time, from a trace. The timeline's rows of
    functions are sorted by start."""

    def __init__(self, timeline: Timeline, track: int) -> None:
        host = timeline.host
        rows = host.track == track
        self._names = timeline.names
        self._start = host.start_ns[rows]
        self._end = host.end_ns[rows]
        self._name = host.name[rows]
        self._kind = host.kind[rows]

    def at(self, time_ns: int) -> list[tuple[HostKind, str]]:
        """Kinds and names on the stack at a time, innermost first; empty where unknown."""
        last = int(np.searchsorted(self._start, time_ns, "right"))
        first = max(0, last - _SCAN)
        covering = np.flatnonzero(self._end[first:last] > time_ns)[-_DEPTH:][::-1] + first
        return [(HostKind(self._kind[row]), self._names[self._name[row]]) for row in covering]


def describe(stack: Sequence[tuple[HostKind, str]]) -> str:
    """The program's innermost function, and the built-in that it called itself, if it did:
    'item() in step train.py:88'.

    Without one the innermost named range, and the operator in it: 'aten::nonzero in forward'. ''
    where there is neither.
    """
    python = [name for kind, name in stack if kind == HostKind.PYTHON]
    own = [
        (at, frame)
        for at, name in enumerate(python)
        if kind_of_frame(name) == CodeKind.OWN_PYTHON and (frame := _FRAME.match(name))
    ]
    inner = [one for one in own if one[1]["function"] not in _ENTRIES] or own
    if inner:
        at, frame = inner[0]
        where = f"{frame['function']} {frame['file']}:{frame['line']}"
        called = _BUILTIN.match(python[at - 1]) if at else None
        return f"{called['name']}() in {where}" if called else where
    ranges = [name for kind, name in stack if kind == HostKind.RANGE]
    operators = [name for kind, name in stack if kind == HostKind.OPERATOR]
    # The outermost operator is what the program asked for.
    return " in ".join(filter(None, ("".join(operators[-1:]), "".join(ranges[:1]))))


def code_locations_of(
    timeline: Timeline, blamed: BlamedStalls, cause: Cause, track: int
) -> list[CodeLocation]:
    """Code of a thread in the longest stalls of a cause, the largest share first.

    Shares are of all those stalls' time. Stalls without a known function count in the whole and may
    take one of the `MAX_LOCATIONS`, so shares need not add up to 1.
    """
    stalls = blamed.stalls
    rows = np.flatnonzero((blamed.cause == CODE[cause]) & (blamed.track == track))
    if not len(rows) or track < 0:  # -1: of no thread
        return []
    duration: I64 = stalls.duration_ns[rows]
    chosen = rows[np.argsort(-duration, kind="stable")[:SAMPLED_STALLS]]
    stacks = TraceStacks(timeline, track)
    weights: dict[str, int] = defaultdict(int)
    for row in chosen.tolist():
        begin, launch = int(stalls.start[row]), int(blamed.launch_ns[row])
        is_synchronization = cause == Cause.SYNCHRONIZATION
        at = begin - _BEFORE_NS if is_synchronization else (begin + launch) // 2
        if blamed.earlier_wait_ns[row] >= 0:
            at = int(blamed.earlier_wait_ns[row])
        weights[describe(stacks.at(at))] += int(stalls.end[row]) - begin
    whole = sum(weights.values())
    ranked = sorted(weights.items(), key=lambda item: -item[1])
    first = ranked[:MAX_LOCATIONS]
    return [CodeLocation(text, weight / whole) for text, weight in first if text and whole]
