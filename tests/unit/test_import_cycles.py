# SPDX-License-Identifier: Apache-2.0
"""No module imports itself by way of others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "sonde"
PARTS = ("cli", "export", "health", "host", "metrics", "model", "query", "sinks")


def modules() -> dict[str, Path]:
    """Dotted name to path of every module."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = ("sonde", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports_of(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of ours that a module imports, those imported inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in known else node.module for name in names)


@pytest.mark.parametrize("part", PARTS)
def test_no_cycle_of_imports(part: str) -> None:
    known = modules()
    inside = {name: path for name, path in known.items() if name.split(".")[1:2] == [part]}
    graph = {name: set(imports_of(path, known)) & inside.keys() for name, path in inside.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
