# SPDX-License-Identifier: Apache-2.0
"""Sets of intervals, held against sets of points."""

from __future__ import annotations

import numpy as np
import pytest

from sonde.analyze import intervals as sets
from sonde.analyze.intervals import Intervals

END = 200


def some(random):
    """Intervals from -40 on, some of which touch."""
    edges = random.integers(-40, 0) + np.cumsum(random.integers(0, 9, 2 * random.integers(0, 14)))
    start, end = edges[0::2], edges[1::2]
    return Intervals(start[end > start], end[end > start])


def points(of):
    inside = np.zeros(END + 40, bool)
    for start, end in zip(of.start.tolist(), of.end.tolist(), strict=True):
        inside[start + 40 : end + 40] = True
    return inside


@pytest.mark.parametrize("at_once", [1, 3, 1 << 16])
def test_what_lies_in_both_and_in_one_alone(monkeypatch, at_once):
    monkeypatch.setattr(sets, "_AT_ONCE", at_once)
    random = np.random.default_rng(at_once)
    for _ in range(2_000):
        a, b = some(random), some(random)
        for found, truth in (
            (sets.intersect(a, b), points(a) & points(b)),
            (sets.subtract(a, b), points(a) & ~points(b)),
            (sets.joined(a, b), points(a) | points(b)),
        ):
            assert (points(found) == truth).all()
            assert (found.end > found.start).all()
            assert (found.start[1:] >= found.end[:-1]).all()
        low, high = np.sort(random.integers(-40, END, (2, 50)), axis=0)
        length = [points(a)[i + 40 : j + 40].sum() for i, j in zip(low, high, strict=True)]
        assert sets.Coverage(a).within(low, high).tolist() == length
