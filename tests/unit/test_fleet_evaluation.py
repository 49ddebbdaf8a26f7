# SPDX-License-Identifier: Apache-2.0
"""The services do not depend on what evaluates them; a simulation is of the scenario given."""

import ast
from pathlib import Path

import pytest

import sonde.fleet
from sonde.fleet.evaluation.simulated_nodes import HOUR_S, START_S
from sonde.fleet.evaluation.simulation import Scenario, open_engine, run

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


def test_a_simulation_may_begin_at_any_hour():
    start_s = START_S + HOUR_S
    scenario = Scenario(20, 16, 3, dropouts=0, one_sided=0, stragglers=0, liars=0, start_s=start_s)
    with open_engine("local", 1) as engine:
        outcome = run(scenario, engine)

    assert (outcome.verified, outcome.exact, outcome.release.start_s) == (20, True, start_s)
