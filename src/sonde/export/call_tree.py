# SPDX-License-Identifier: Apache-2.0
"""Stacks of all kinds as one tree of functions, small enough to ship in a page.

Stacks share most of their frames, so a tree of them is far smaller than the stacks: a node is a
function and its parent, and a stack is the node that it ends in. Nodes that carry next to nothing
are folded into one child of their nearest heavier ancestor, which keeps every sum exact.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sonde.export.picture import tip
from sonde.model.code import NO_STACK, Frame
from sonde.model.profile import Profile, ProfileKind

LIGHT = Frame(kind="unknown", function="(lighter stacks)", binary="")
"""Stands for the frames that were folded."""

_ROOT = 0
NODE_BYTES = 256
"""What a node takes while the tree grows."""
_NODES_AT_ONCE = 4_096


@dataclass(slots=True)
class Function:
    """A function and the source lines of it that occur."""

    name: str
    kind: str
    binary: str
    file: str
    first_line: int = 0
    last_line: int = 0

    def saw(self, line: int) -> None:
        """Widen the lines to hold one more; 0 is unknown."""
        if line:
            self.first_line = min(self.first_line or line, line)
            self.last_line = max(self.last_line, line)


@dataclass(slots=True)
class KindRows:
    """Weights of one kind, columnwise: what a thread did at a node."""

    thread: list[int] = field(default_factory=list)
    node: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    ns: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CallTree:
    """Node 0 is the root; the parent of a node comes before it."""

    functions: list[Function]
    parent: Sequence[int]
    function: Sequence[int]
    kinds: dict[ProfileKind, KindRows]
    folded_nodes: int
    """Nodes that were too light to keep."""


def build(
    profiles: Sequence[Profile], max_nodes: int, hold: Callable[[int], None] = lambda _: None
) -> CallTree:
    """Build the tree of several profiles of one capture; at most 2 × `max_nodes` nodes.

    `hold` is called with the memory that the tree is about to take before it is folded.
    """
    growing = _Growing(hold)
    ends = [growing.add(profile) for profile in profiles]
    place, folded = growing.fold(_shares(growing.parent, profiles, ends), max_nodes)
    kinds = {
        profile.kind: _rows(profile, [place[node] for node in nodes])
        for profile, nodes in zip(profiles, ends, strict=True)
    }
    return CallTree(growing.functions, growing.parent, growing.function, kinds, folded)


class _Growing:
    """A tree while stacks are added to it."""

    def __init__(self, hold: Callable[[int], None]) -> None:
        self._hold = hold
        self.functions: list[Function] = []
        self.parent = array("i", [-1])
        self.function = array("i", [-1])
        self._function_numbers: dict[tuple[str, str, str], int] = {}
        self._children: dict[tuple[int, int], int] = {}
        self._of_frame: dict[int, int] = {}
        self._of_stack: dict[int, int] = {}

    def add(self, profile: Profile) -> list[int]:
        """Add the stacks of a profile; returns the node that each of its rows ends in."""
        nodes = []
        for row in profile:
            node = self._of_stack.get(row.stack)
            if node is None:
                node = self._of_stack[row.stack] = self._walk(profile, row.stack)
            if end := tip(profile, row):
                on_gpu = profile.kind in (ProfileKind.GPU_CALLS, ProfileKind.GPU_TIME)
                kind = "call" if on_gpu else "wait"
                node = self._child(node, self._number(Frame(kind, end, "")))
            nodes.append(node)
        return nodes

    def _walk(self, profile: Profile, stack: int) -> int:
        stacks, of_frame, children = profile.stacks, self._of_frame, self._children
        indices = stacks.indices(stack)
        if not len(indices):
            return self._child(_ROOT, self._number(NO_STACK))
        node, last = _ROOT, -1
        for index in reversed(indices):
            function = of_frame.get(index)
            if function is None:
                function = of_frame[index] = self._number(stacks.frames[index])
            if function == last and not stacks.frames[index].function:
                continue  # As picture.root_first, which would take twice as long here.
            last = function
            child = children.get((node, function))
            node = self._child(node, function) if child is None else child
        return node

    def _child(self, node: int, function: int) -> int:
        key = (node, function)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = len(self.parent)
            if not child % _NODES_AT_ONCE:
                self._hold(_NODES_AT_ONCE * NODE_BYTES)
            self.parent.append(node)
            self.function.append(function)
        return child

    def _number(self, frame: Frame) -> int:
        key = (frame.name, frame.binary, frame.file)
        number = self._function_numbers.get(key)
        if number is None:
            number = self._function_numbers[key] = len(self.functions)
            self.functions.append(Function(frame.name, frame.kind, frame.binary, frame.file))
        self.functions[number].saw(frame.line)
        return number

    def fold(self, shares: Sequence[float], max_nodes: int) -> tuple[Sequence[int], int]:
        """Keep the heaviest nodes; returns where each old node went, and how many were folded."""
        count = len(self.parent)
        if count <= max_nodes:
            return range(count), 0
        least = sorted(shares, reverse=True)[max_nodes]
        light = self._number(LIGHT)
        parent, function = self.parent, self.function
        self.parent, self.function, self._children = array("i", [-1]), array("i", [-1]), {}
        place = array("i", [0]) * count
        kept = bytearray(count)
        kept[_ROOT] = 1
        folded = 0
        for node in range(1, count):
            above = parent[node]
            # No child is heavier than its parent, so what is kept hangs together.
            if shares[node] > least:
                kept[node] = 1
                place[node] = self._child(place[above], function[node])
            else:
                folded += 1
                place[node] = self._child(place[above], light) if kept[above] else place[above]
        return place, folded


def _shares(
    parent: Sequence[int], profiles: Sequence[Profile], ends: Sequence[Sequence[int]]
) -> Sequence[float]:
    """Of each node and what it called: its share of a kind, summed over the kinds."""
    shares = array("d", [0.0]) * len(parent)
    for profile, nodes in zip(profiles, ends, strict=True):
        whole = sum(profile.row_weight) or 1
        for node, weight in zip(nodes, profile.row_weight, strict=True):
            shares[node] += weight / whole
    for node in range(len(parent) - 1, 0, -1):
        shares[parent[node]] += shares[node]
    return shares


def _rows(profile: Profile, nodes: Sequence[int]) -> KindRows:
    at: dict[tuple[int, int], int] = {}
    rows = KindRows()
    for row, node in zip(profile, nodes, strict=True):
        key = (row.thread, node)
        number = at.get(key)
        if number is None:
            at[key] = len(rows.node)
            rows.thread.append(row.thread)
            rows.node.append(node)
            rows.events.append(row.events)
            rows.ns.append(row.ns)
            rows.bytes.append(row.bytes)
        else:
            rows.events[number] += row.events
            rows.ns[number] += row.ns
            rows.bytes[number] += row.bytes
    return rows
