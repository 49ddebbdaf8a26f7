# SPDX-License-Identifier: Apache-2.0
"""Student's t and the interval of Clopper and Pearson, from the incomplete beta function.

Without SciPy, which would be imported for these alone (docs/design/libraries.md has its cost).
"""

from __future__ import annotations

import math
from collections.abc import Callable

_STEPS = 300
"""Terms of the continued fraction at most; more of them for large a and b."""
_TINY = 1e-300
"""In place of a divisor of 0, as Lentz's method has it."""
_RELATIVE_ERROR = 1e-14
"""The fraction has converged once a term changes it by less."""


def regularized_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b), the regularized incomplete beta function, for 0 <= x <= 1 and a, b > 0.

    By its continued fraction (DLMF 8.17.22) with Lentz's method. Quantiles differ from SciPy's by
    less than 4e-7 of their value for a + b up to 1e6.
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - regularized_beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(log_front + a * math.log(x) + b * math.log1p(-x)) / a
    return front * _continued_fraction(x, a, b)


def _continued_fraction(x: float, a: float, b: float) -> float:
    numerator, denominator = 1.0, _away_from_zero(1 - (a + b) * x / (a + 1))
    denominator = 1 / denominator
    value = denominator
    for m in range(1, max(_STEPS, 10 * math.isqrt(int(max(a, b))))):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            denominator = 1 / _away_from_zero(1 + term * denominator)
            numerator = _away_from_zero(1 + term / numerator)
            change = denominator * numerator
            value *= change
        if abs(change - 1) < _RELATIVE_ERROR:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def beta_quantile(p: float, a: float, b: float) -> float:
    """The x with I_x(a, b) = p, as exactly as `regularized_beta` is."""
    return _root(lambda x: regularized_beta(x, a, b) - p)


def student_t_quantile(p: float, degrees: int) -> float:
    """The quantile of Student's t distribution: the value it stays below with probability `p`.

    For 0.5 <= p < 1, from I_x(degrees/2, 1/2) with x = degrees / (degrees + t²) (DLMF 8.17). Raises
    ValueError for other numbers.
    """
    if not 0.5 <= p < 1 or degrees < 1:
        raise ValueError(f"no quantile for p={p} with {degrees} degrees of freedom")
    if p == 0.5:
        return 0.0
    # The smaller side of the beta: near x = 1 the other one loses digits.
    y = beta_quantile(2 * p - 1, 0.5, degrees / 2)
    return math.sqrt(degrees * y / (1 - y))


def clopper_pearson(hits: int, trials: int, confidence: float) -> tuple[float, float]:
    """One-sided (lower, upper) bounds of a probability, each with this confidence.

    Clopper and Pearson 1934: quantiles of Beta(hits, trials - hits + 1) and
    Beta(hits + 1, trials - hits). For a two-sided 95 % interval give 0.975.
    """
    misses = trials - hits
    low = beta_quantile(1 - confidence, hits, misses + 1) if hits else 0.0
    high = beta_quantile(confidence, hits + 1, misses) if misses else 1.0
    return low, high


def _root(function: Callable[[float], float]) -> float:
    """Where a function that rises over [0, 1] is 0, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):  # halvings: 2^-60 is below the precision of a float near 1
        middle = (low + high) / 2
        if function(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
