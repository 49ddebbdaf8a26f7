# SPDX-License-Identifier: Apache-2.0
"""The same work over Ray as over threads. Ray is large and optional: skipped where it is not."""

import pytest

from sonde.fleet.evaluation import simulation

pytest.importorskip("ray")


def test_ray_and_threads_agree():
    scenario = simulation.Scenario(200, 64, 20)
    outcomes = []
    for name in ("local", "ray"):
        with simulation.open_engine(name, 2) as engine:
            outcomes.append(simulation.run(scenario, engine))
    local, ray = outcomes
    assert ray.exact
    assert ray.agreed
    assert (ray.verified, ray.refused) == (local.verified, local.refused)
