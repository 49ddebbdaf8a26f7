# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a job wait for, on jobs made up here."""

from __future__ import annotations

import random

import pytest

from sonde.analyze.stragglers import Straggle, Work, straggling

STAGES, REPLICAS, STEPS, PIECES = 4, 4, 6, 4


def job(*, worker=1.0, stage=1.0, sequences=0.0, noise=0.01, replicas=REPLICAS):
    """Durations; the worker (2, 1) and the stage 3 take that many times as long; pieces differ."""
    chance = random.Random(7)
    for step in range(STEPS):
        for piece in range(PIECES):
            for replica in range(replicas):
                length = 1 + sequences * chance.random()
                for at in range(STAGES):
                    seconds = 0.1 * length * (1 + noise * chance.random())
                    seconds *= worker if (at, replica) == (2, 1) else 1.0
                    seconds *= stage if at == 3 else 1.0
                    yield Work("forward", at, replica, step, piece, seconds)
                    yield Work("backward", at, replica, step, piece, 2 * seconds)


@pytest.mark.parametrize(
    ("how", "kind", "where"),
    [
        ({}, Straggle.NOTHING, (-1, -1)),
        ({"worker": 1.5}, Straggle.WORKER, (2, 1)),
        ({"stage": 1.5}, Straggle.STAGE, (3, -1)),
        ({"stage": 1.5, "replicas": 1}, Straggle.STAGE, (3, -1)),
        ({"sequences": 1.5}, Straggle.SEQUENCES, (-1, -1)),
        # The larger of two is reported.
        ({"worker": 2.5, "stage": 1.3}, Straggle.WORKER, (2, 1)),
        ({"worker": 1.2, "stage": 1.8}, Straggle.STAGE, (3, -1)),
    ],
)
def test_what_is_slow_is_distinguished(how, kind, where):
    found = straggling(job(**how))
    assert (found.kind, (found.stage, found.replica)) == (kind, where)


def test_nothing_is_reported_of_nothing():
    assert straggling([]).kind == Straggle.NOTHING
    assert straggling([Work("forward", 0, 0, 0, 0, 0.0)]).kind == Straggle.NOTHING
    assert straggling([Work("forward", 0, 0, 0, 0, 1.0)]).kind == Straggle.NOTHING
