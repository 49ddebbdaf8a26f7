# SPDX-License-Identifier: Apache-2.0
"""Programs made by chance whose call trees are known: every function has one place in one tree.

So the program's innermost own function of a stack determines all those above it, how often each
recurses, and in which thread it runs. Three kinds: native (C++ without frame pointers: large,
variable and realigned frames, exceptions, callbacks from libc, signal handlers), Python (recursion,
callbacks from C, generators, constructors, coroutines), and Python that calls native code that
calls Python. Two threads each.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

NATIVE = ("plain", "wide", "aligned", "large", "catches", "sorts")
PYTHON = ("plain", "sorts", "generates", "constructs", "reduces", "awaits")
SPIN = "spin"
THREADS = 2
_NODES = 24
_MAX_CHILDREN = 3


@dataclass(slots=True)
class Node:
    """A function, and those that it calls on another's behalf or its own."""

    name: str
    kind: str
    depth: int = 0
    """It calls itself so often before it does anything else."""
    native_depth: int = 0
    """So does the native function that it calls, if it calls one."""
    children: list[Node] = field(default_factory=list)

    @property
    def path(self) -> list[str]:
        """From its caller to what it calls: its own frames, the outermost first."""
        return [self.name] * (self.depth + 1) + self.between

    @property
    def between(self) -> list[str]:
        """Functions that stand between it and what it calls."""
        if self.kind == "calls":
            return [f"{self.name}_c"] * (self.native_depth + 1) + [f"{self.name}_back"]
        suffix = _BETWEEN.get(self.kind)
        return [f"{self.name}_{suffix}"] if suffix else []


_BETWEEN = {
    "sorts": "by",
    "signals": "on",
    "generates": "gen",
    "constructs": "init",
    "reduces": "fold",
    "awaits": "co",
}


@dataclass(frozen=True, slots=True)
class Tree:
    """What one program does: a root for each thread."""

    roots: list[Node]
    paths: dict[str, list[list[str]]]
    """By the innermost own function: every path of own functions that leads to it."""

    def is_right(self, own: list[str]) -> bool:
        """Whether a stack has these functions of the program, the outermost first."""
        without = own[:-1] if own[-1:] == [SPIN] else own
        return bool(without) and without in self.paths.get(without[-1], [])


def random_tree(seed: int, kinds: tuple[str, ...]) -> Tree:
    """A tree by chance, the same for a seed every time. `kinds`: NATIVE, or PYTHON and more."""
    chance = random.Random(seed)
    roots = []
    numbers = iter(range(1_000_000))
    for _ in range(THREADS):
        nodes = [Node(f"n{next(numbers)}", "plain")]
        while len(nodes) < _NODES:
            # mostly under the youngest: deep trees rather than wide ones
            parent = chance.choice(nodes[-3:])
            if len(parent.children) == _MAX_CHILDREN:
                parent = nodes[-1]
            depth = chance.choice((0, 0, 0, 0, 0, 2, 7, 25))
            node = Node(f"n{next(numbers)}", chance.choice(kinds), depth, chance.randrange(4))
            parent.children.append(node)
            nodes.append(node)
        if kinds[: len(NATIVE)] == NATIVE:
            inner = [it for it in nodes[1:] if it.children]
            chance.choice(inner).kind = "signals"  # one for each thread, which has its own signal
        roots.append(nodes[0])
    return Tree(roots, dict(_paths(roots)))


def _paths(roots: list[Node]) -> Iterator[tuple[str, list[list[str]]]]:
    waiting = [(root, list[str]()) for root in roots]
    while waiting:
        node, above = waiting.pop()
        whole = above + node.path
        for name in dict.fromkeys(node.path):
            ends = [i for i, it in enumerate(whole) if it == name]
            yield name, [whole[: end + 1] for end in ends]
        waiting += [(child, whole) for child in node.children]


def nodes(tree: Tree) -> Iterator[Node]:
    """All of them."""
    waiting = list(tree.roots)
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children
