# SPDX-License-Identifier: Apache-2.0
"""Quantiles against published tables and against SciPy's results."""

from __future__ import annotations

import pytest

from sonde.model.confidence import clopper_pearson, regularized_beta, student_t_quantile


@pytest.mark.parametrize(
    ("p", "degrees", "expected"),
    [  # scipy.stats.t.ppf of SciPy 1.17
        *[(0.95, 1, 6.313751515), (0.95, 20, 1.724718243)],
        *[(0.975, 1, 12.706204736), (0.975, 7, 2.364624251), (0.975, 1000, 1.962339081)],
        *[(0.9999, 2, 70.700071075), (0.5, 3, 0.0)],
    ],
)
def test_student_s_quantiles_are_those_of_scipy(p: float, degrees: int, expected: float) -> None:
    assert student_t_quantile(p, degrees) == pytest.approx(expected, rel=1e-8)


def test_the_bounds_of_a_probability_are_those_published() -> None:
    low, high = clopper_pearson(5, 100, 0.975)  # the two-sided 95 % interval

    assert (low, high) == pytest.approx((0.0164319, 0.1128349), abs=1e-7)


@pytest.mark.parametrize("trials", [1, 10, 40_000])
def test_none_and_all_have_the_closed_forms(trials: int) -> None:
    for confidence in (0.95, 0.999):
        low, high = clopper_pearson(0, trials, confidence)
        assert (low, high) == (0.0, pytest.approx(1 - (1 - confidence) ** (1 / trials), rel=1e-9))
        low, high = clopper_pearson(trials, trials, confidence)
        assert (low, high) == (pytest.approx((1 - confidence) ** (1 / trials), rel=1e-9), 1.0)


def test_the_beta_function_is_symmetric_and_refuses_what_has_no_quantile() -> None:
    assert regularized_beta(0.3, 2, 5) == pytest.approx(0.579825, abs=1e-9)  # a sum of binomials
    assert regularized_beta(0.3, 2, 5) + regularized_beta(0.7, 5, 2) == pytest.approx(1)
    for p, degrees in ((0.3, 5), (1.0, 5), (0.9, 0)):
        with pytest.raises(ValueError, match="quantile"):
            student_t_quantile(p, degrees)
