# SPDX-License-Identifier: Apache-2.0
"""How sure a share is that comes from windows, and what windows cannot show."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from sonde.analyze.intervals import Intervals
from sonde.analyze.sampling import _cannot, half_width

# Of Student's distribution at 0.975, for 1, 2, ... degrees of freedom, from published tables.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
LATER = {15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980}


@pytest.mark.parametrize(
    ("count", "student"), [*enumerate(STUDENT, 2), *((n + 1, one) for n, one in LATER.items())]
)
def test_half_the_width_is_student_s_quantile_times_the_standard_error(count, student):
    length = np.full(count, 1_000_000)
    part = np.array([500_000 + 1000 * (number % 3) for number in range(count)])
    error = np.std(part / 1e6, ddof=1) / count**0.5
    assert half_width(part, length) == pytest.approx(student * error, rel=0.002)


def test_of_many_windows_the_quantile_is_the_normal_distribution_s():
    part = np.array([500_000 + 1000 * (number % 3) for number in range(5000)])
    error = np.std(part / 1e6, ddof=1) / 5000**0.5
    assert half_width(part, np.full(5000, 1_000_000)) == pytest.approx(1.96 * error, rel=0.001)


def test_an_interval_is_never_wider_than_all():
    assert half_width(np.array([0, 1000]), np.array([1000, 1000])) == 1.0
    assert half_width(np.array([500]), np.array([1000])) == 1.0


@pytest.mark.parametrize(("lasts_ms", "half"), [(7.0, "4 ms"), (5.2, "3 ms"), (100.0, "50 ms")])
def test_steps_that_are_too_long_to_be_seen_are_stated(lasts_ms, half):
    start = np.array([0, 250_000_000])
    window = Intervals(start, start + round(lasts_ms * 1e6))
    timeline = SimpleNamespace(calls=SimpleNamespace(correlation=np.zeros(3, np.int64)))
    often, long = _cannot(timeline, window, 500_000_000, None)
    assert "every 250 ms" in often
    assert f"half a window ({half})" in long
    steps = SimpleNamespace(median_ns=0.5 * lasts_ms * 1e6)
    assert len(_cannot(timeline, window, 500_000_000, steps)) == 1
