# SPDX-License-Identifier: Apache-2.0
"""The services do not depend on what evaluates them."""

import ast
from pathlib import Path

import pytest

import sonde.fleet

SERVICES = sorted(Path(sonde.fleet.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_no_module_that_runs_imports_one_that_evaluates(path):
    tree = ast.parse(path.read_text())
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    assert [name for name in imported if "evaluation" in name] == []
