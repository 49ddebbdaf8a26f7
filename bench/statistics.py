# SPDX-License-Identifier: Apache-2.0
"""A mean with the bound that the truth stays below."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sonde.model.confidence import student_t_quantile


@dataclass(frozen=True, slots=True)
class Bounded:
    """A mean and its upper 95 % bound (one-sided)."""

    mean: float
    upper: float


def bounded(values: Sequence[float]) -> Bounded:
    """Mean of independent values with its bound by Student's t; infinite for fewer than two."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return Bounded(mean, math.inf)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    t = student_t_quantile(0.95, len(values) - 1)
    return Bounded(mean, mean + t * math.sqrt(variance / len(values)))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Low and high of the 95 % interval of the mean of independent values, by Student's t; infinite
    for fewer than two."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return -math.inf, math.inf
    t = student_t_quantile(0.975, len(values) - 1)
    wide = t * statistics.stdev(values) / math.sqrt(len(values))
    return mean - wide, mean + wide
