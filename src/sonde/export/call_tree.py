# SPDX-License-Identifier: Apache-2.0
"""The stacks of all kinds as one call tree, small enough for an HTML page.

Stacks share most of their frames, so the tree is far smaller than the stacks: a node is a function
and its parent, and a stack is its leaf node. Nodes with very little weight are merged into one
child of their nearest heavier ancestor, which keeps every sum exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sonde.export.stack_frames import I64, distinct_stacks, leaf_labels, root_first_blocks, sums_of
from sonde.model.code import NO_STACK, Frame, Stacks
from sonde.model.profile import Profile, ProfileKind
from sonde.query.frame_columns import FrameColumns
from sonde.query.grouping import grouped

LIGHT = Frame(kind="unknown", function="(lighter stacks)", binary="")
"""Stands for the nodes that were merged."""

_ROOT = 0
NODE_BYTES = 256
"""Memory for a node while the tree is built."""

Ints = I64 | Sequence[int]
"""An array, or, of numbers too large for one, a list."""
Floats = npt.NDArray[np.float64]


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


@dataclass(frozen=True, slots=True)
class KindRows:
    """Weights of one kind by thread and node, stored by column; shape (rows,)."""

    thread: I64
    node: I64
    events: Ints
    ns: Ints
    bytes: Ints


@dataclass(frozen=True, slots=True)
class CallTree:
    """Node 0 is the root; the parent of a node comes before it."""

    functions: list[Function]
    parent: I64
    function: I64
    """Of each node; shape (nodes,)."""
    kinds: dict[ProfileKind, KindRows]
    folded_nodes: int
    """Number of nodes that were merged into `LIGHT`."""


def build(
    profiles: Sequence[Profile], max_nodes: int, hold: Callable[[int], None] = lambda _: None
) -> CallTree:
    """Build the tree of several profiles of one capture; at most 2 × `max_nodes` nodes.

    `hold` is called with the bytes that the tree is about to use before light nodes are merged.
    """
    functions = _Functions()
    nodes = _Nodes(hold)
    used = distinct_stacks(profiles)
    if profiles:
        nodes.add_stacks(profiles[0].stacks, used, functions)
    ends = [nodes.add_labels(profile, used, functions) for profile in profiles]
    new_node, folded = nodes.merge_light(_weights(profiles, ends), max_nodes, functions)
    kinds = {
        profile.kind: _rows(profile, new_node[at])
        for profile, at in zip(profiles, ends, strict=True)
    }
    return CallTree(functions.listed, nodes.parent, nodes.function, kinds, folded)


class _Functions:
    """The functions of a tree, each with a number."""

    def __init__(self) -> None:
        self.listed: list[Function] = []
        self._numbers: dict[tuple[str, str, str], int] = {}
        self._key: I64 | None = None
        """Of each frame, by its texts; frames with the same one are of one function."""

    def numbers(self, frames: Sequence[Frame], wanted: I64) -> I64:
        """The number of the function of each of some frames."""
        if not isinstance(frames, FrameColumns):
            return np.array([self.number(frames[at]) for at in wanted.tolist()], np.int64)
        if self._key is None:
            self._key = frames.distinct(("function", "binary", "file"))[1]
        keys, key = grouped(self._key[wanted])
        first = np.full(len(keys), len(wanted))
        np.minimum.at(first, key, np.arange(len(wanted)))
        texts = (frames.texts_of(column, wanted[first]) for column in ("binary", "file", "kind"))
        known = [*map(self._known, frames.names_of(wanted[first]), *texts)]
        line = frames.line[wanted].astype(np.int64)
        lines = np.unique(key[line > 0] << 32 | line[line > 0])  # the other frames add no more
        for at, number in zip((lines >> 32).tolist(), (lines & 0xFFFFFFFF).tolist(), strict=True):
            self.listed[known[at]].add_line(number)
        return np.array(known, np.int64)[key]

    def number(self, frame: Frame) -> int:
        number = self._known(frame.name, frame.binary, frame.file, frame.kind)
        self.listed[number].add_line(frame.line)
        return number

    def _known(self, name: str, binary: str, file: str, kind: str) -> int:
        key = (name, binary, file)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.listed)
            self.listed.append(Function(name, kind, binary, file))
        return number


class _Nodes:
    """The nodes of a tree, level by level: all stacks advance by one frame at a time."""

    def __init__(self, hold: Callable[[int], None]) -> None:
        self._hold = hold
        self.parent: I64 = np.array([-1], np.int64)
        self.function: I64 = np.array([-1], np.int64)
        self._levels = [0, 1]
        """First node of each level, and the number of nodes."""
        self._leaf: I64 = np.zeros(0, np.int64)
        """The innermost node of each stack that was added."""

    def add_stacks(self, stacks: Stacks, used: I64, functions: _Functions) -> None:
        """Add the stacks `used`, ascending."""
        of_frame = np.full(len(stacks.frames), -1, np.int32)
        depths, parts = [], []
        for _, flat, ends in root_first_blocks(stacks, used):
            is_new = np.zeros(len(of_frame), bool)
            is_new[flat] = True
            new = np.flatnonzero(is_new & (of_frame < 0))
            of_frame[new] = functions.numbers(stacks.frames, new)
            parts.append(of_frame[flat])
            depths.append(np.diff(ends, prepend=0))
        flat = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        del parts  # as large as `flat`
        depth = np.concatenate(depths) if depths else np.zeros(0, np.int64)
        self._hold(flat.nbytes + 6 * depth.nbytes)
        starts = np.cumsum(depth) - depth
        deepest_first = np.argsort(-depth, kind="stable")
        starts, sorted_depth = starts[deepest_first], depth[deepest_first]
        node = np.zeros(len(depth), np.int64)
        levels = int(sorted_depth[0]) if len(depth) else 0
        # How many stacks are deeper than each level.
        deeper = np.searchsorted(-sorted_depth, -np.arange(levels), side="left")
        parents, numbers = [self.parent], [self.function]
        for level, count in enumerate(deeper.tolist()):
            function = flat[starts[:count] + level]
            node[:count], *added = self._children(node[:count], function)
            parents.append(added[0])
            numbers.append(added[1])
        empty = sorted_depth == 0
        if empty.any():
            count = int(empty.sum())
            nothing = np.full(count, functions.number(NO_STACK))
            node[empty], *added = self._children(np.zeros(count, np.int64), nothing)
            parents.append(added[0])
            numbers.append(added[1])
        self.parent, self.function = np.concatenate(parents), np.concatenate(numbers)
        self._leaf = np.empty_like(node)
        self._leaf[deepest_first] = node

    def add_labels(self, profile: Profile, used: I64, functions: _Functions) -> I64:
        """Add the labels on top of a profile's stacks; return the innermost node of each row."""
        node = self._leaf[np.searchsorted(used, np.asarray(profile.row_stack, np.int64))]
        on_gpu = profile.kind in (ProfileKind.GPU_CALLS, ProfileKind.GPU_TIME)
        kind = "call" if on_gpu else "wait"
        labels, index = leaf_labels(profile)
        known = [functions.number(Frame(kind, text, "")) for text in labels]
        number = np.array([*known, -1], np.int64)[index]
        labelled = number >= 0
        if labelled.any():
            node[labelled], *added = self._children(node[labelled], number[labelled])
            self.parent = np.concatenate((self.parent, added[0]))
            self.function = np.concatenate((self.function, added[1]))
        return node

    def _children(self, node: I64, function: npt.NDArray[Any]) -> tuple[I64, I64, I64]:
        """(the child of each node with this function; parents and functions of these new nodes).

        They are a separate level.
        """
        distinct, index = grouped((node << 32) | function)
        self._hold(len(distinct) * NODE_BYTES)
        first = self._levels[-1]
        self._levels.append(first + len(distinct))
        return first + index, distinct >> 32, distinct & 0xFFFFFFFF

    def merge_light(
        self, weights: Sequence[tuple[I64, Floats]], max_nodes: int, functions: _Functions
    ) -> tuple[I64, int]:
        """Keep the heaviest nodes; return (new node of each old one, number of merged nodes)."""
        count = len(self.parent)
        if count <= max_nodes:
            return np.arange(count), 0
        shares = self._shares(weights)
        least = np.partition(shares, count - 1 - max_nodes)[count - 1 - max_nodes]
        # No child is heavier than its parent, so the kept nodes form a tree.
        kept = shares > least
        kept[_ROOT] = True
        above = np.where(kept, np.arange(count), self.parent)
        while not kept[above].all():
            above = above[above]
        new_node = np.cumsum(kept) - 1
        folded = np.flatnonzero(~kept)
        under, which = np.unique(above[folded], return_inverse=True)
        merged = int(kept.sum()) + np.arange(len(under))
        parents, function = self.parent[kept], self.function[kept]
        parents[1:] = new_node[parents[1:]]
        self.parent = np.concatenate((parents, new_node[under]))
        light = np.full(len(under), functions.number(LIGHT))
        self.function = np.concatenate((function, light))
        new_node[folded] = merged[which]
        return new_node, len(folded)

    def _shares(self, weights: Sequence[tuple[I64, Floats]]) -> Floats:
        """Weight of each node with its callees, as a share of its kind, summed over the kinds."""
        shares = np.zeros(len(self.parent))
        for node, weight in weights:
            shares += np.bincount(node, weight / (weight.sum() or 1), len(shares))
        for first, end in reversed([*pairwise(self._levels)][1:]):
            parents = self.parent[first:end]
            low, high = int(parents.min()), int(parents.max()) + 1
            shares[low:high] += np.bincount(parents - low, shares[first:end], high - low)
        return shares


def _weights(profiles: Sequence[Profile], ends: Sequence[I64]) -> list[tuple[I64, Floats]]:
    """For each profile (the node that each row ends in, the row's weight)."""
    return [
        (at, np.asarray(profile.row_weight, np.float64))
        for profile, at in zip(profiles, ends, strict=True)
    ]


def _rows(profile: Profile, nodes: I64) -> KindRows:
    """The rows of a profile, summed by thread and node. `nodes`: the node of each row."""
    keys, group = grouped((np.asarray(profile.row_thread, np.int64) << 32) | nodes)
    sums = (profile.row_events, profile.row_ns, profile.row_bytes)
    return KindRows(
        keys >> 32,
        keys & 0xFFFFFFFF,
        *(sums_of(column, group, len(keys)) for column in sums),
    )
