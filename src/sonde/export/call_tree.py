# SPDX-License-Identifier: Apache-2.0
"""The stacks of all kinds as one call tree, small enough for an HTML page.

Stacks share most of their frames, so the tree is far smaller than the stacks: a node is a function
and its parent, and a stack is its leaf node. Nodes with very little weight are merged into one
child of their nearest heavier ancestor, which keeps every sum exact.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sonde.export.stack_frames import leaf_label
from sonde.model.code import NO_STACK, Frame
from sonde.model.profile import Profile, ProfileKind

LIGHT = Frame(kind="unknown", function="(lighter stacks)", binary="")
"""Stands for the frames that were merged."""

_ROOT = 0
NODE_BYTES = 256
"""Memory for a node while the tree is built."""
_NODES_AT_ONCE = 4_096


@dataclass(slots=True)
class Function:
    """A function and the range of its source lines in the stacks."""

    name: str
    kind: str
    binary: str
    file: str
    first_line: int = 0
    last_line: int = 0

    def add_line(self, line: int) -> None:
        """Extend the range by a line; 0 is unknown."""
        if line:
            self.first_line = min(self.first_line or line, line)
            self.last_line = max(self.last_line, line)


@dataclass(slots=True)
class KindRows:
    """Weights of one kind by thread and node, stored by column."""

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
    """Number of nodes that were merged into `LIGHT`."""


def build(
    profiles: Sequence[Profile], max_nodes: int, hold: Callable[[int], None] = lambda _: None
) -> CallTree:
    """Build the tree of several profiles of one capture; at most 2 × `max_nodes` nodes.

    `hold` is called with the bytes that the tree is about to use before light nodes are merged.
    """
    builder = _TreeBuilder(hold)
    ends = [builder.add(profile) for profile in profiles]
    new_node, folded = builder.merge_light(_shares(builder.parent, profiles, ends), max_nodes)
    kinds = {
        profile.kind: _rows(profile, [new_node[node] for node in nodes])
        for profile, nodes in zip(profiles, ends, strict=True)
    }
    return CallTree(builder.functions, builder.parent, builder.function, kinds, folded)


class _TreeBuilder:
    """A tree while stacks are added to it."""

    def __init__(self, hold: Callable[[int], None]) -> None:
        self._hold = hold
        self.functions: list[Function] = []
        self.parent = array("i", [-1])
        self.function = array("i", [-1])
        self._function_numbers: dict[tuple[str, str, str], int] = {}
        self._children: dict[tuple[int, int], int] = {}
        self._function_of_frame: dict[int, int] = {}
        self._node_of_stack: dict[int, int] = {}

    def add(self, profile: Profile) -> list[int]:
        """Add the stacks of a profile; return the leaf node of each row."""
        nodes = []
        for row in profile:
            node = self._node_of_stack.get(row.stack)
            if node is None:
                node = self._node_of_stack[row.stack] = self._add_stack(profile, row.stack)
            if end := leaf_label(profile, row):
                on_gpu = profile.kind in (ProfileKind.GPU_CALLS, ProfileKind.GPU_TIME)
                kind = "call" if on_gpu else "wait"
                node = self._child(node, self._number(Frame(kind, end, "")))
            nodes.append(node)
        return nodes

    def _add_stack(self, profile: Profile, stack: int) -> int:
        stacks, of_frame, children = profile.stacks, self._function_of_frame, self._children
        indices = stacks.indices(stack)
        if not len(indices):
            return self._child(_ROOT, self._number(NO_STACK))
        node, last = _ROOT, -1
        for index in reversed(indices):
            function = of_frame.get(index)
            if function is None:
                function = of_frame[index] = self._number(stacks.frames[index])
            if function == last and not stacks.frames[index].function:
                continue  # As `stack_frames.root_first`, which would be half as fast here.
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
        self.functions[number].add_line(frame.line)
        return number

    def merge_light(self, shares: Sequence[float], max_nodes: int) -> tuple[Sequence[int], int]:
        """Keep the heaviest nodes; return (new node of each old one, number of merged nodes)."""
        count = len(self.parent)
        if count <= max_nodes:
            return range(count), 0
        least = sorted(shares, reverse=True)[max_nodes]
        light = self._number(LIGHT)
        parent, function = self.parent, self.function
        self.parent, self.function, self._children = array("i", [-1]), array("i", [-1]), {}
        new_node = array("i", [0]) * count
        kept = bytearray(count)
        kept[_ROOT] = 1
        folded = 0
        for node in range(1, count):
            above = parent[node]
            # No child is heavier than its parent, so the kept nodes form a tree.
            if shares[node] > least:
                kept[node] = 1
                new_node[node] = self._child(new_node[above], function[node])
            else:
                folded += 1
                new_node[node] = (
                    self._child(new_node[above], light) if kept[above] else new_node[above]
                )
        return new_node, folded


def _shares(
    parent: Sequence[int], profiles: Sequence[Profile], ends: Sequence[Sequence[int]]
) -> Sequence[float]:
    """Weight of each node with its callees, as a share of its kind, summed over the kinds."""
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
