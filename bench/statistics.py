# SPDX-License-Identifier: Apache-2.0
"""A mean with the bound that the truth stays below."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_T_95: tuple[float, ...] = (
    6.314,
    2.920,
    2.353,
    2.132,
    2.015,
    1.943,
    1.895,
    1.860,
    1.833,
    1.812,
    1.796,
    1.782,
    1.771,
)
_T_95 += (1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725)
"""One-sided 95 % points of Student's t for 1, 2, … degrees of freedom."""


_T_95_BOTH: tuple[float, ...] = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179),
)
"""Two-sided ones."""


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
    t = _T_95[min(len(values) - 1, len(_T_95)) - 1]
    return Bounded(mean, mean + t * math.sqrt(variance / len(values)))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Low and high of the 95 % interval of the mean of independent values, by Student's t; infinite
    for fewer than two."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return -math.inf, math.inf
    t = _T_95_BOTH[min(len(values) - 1, len(_T_95_BOTH)) - 1]
    wide = t * statistics.stdev(values) / math.sqrt(len(values))
    return mean - wide, mean + wide
