# SPDX-License-Identifier: Apache-2.0
"""Selects the bounds of a verdict from shares of the time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from sonde.model.causes import Bound
from sonde.model.verdict import BoundShare

STALLED = 0.15
"""A device that was stalled for less than this share of the time is bound by its kernels, and one
whose other kernels take less is bound by those of one class."""
CO_DOMINANT_FRACTION = 0.6
"""A bound with this fraction of the largest one, or with `LEAST_SHARE` of the time, is reported
beside it."""
SECOND_BOUND_SHARE = 0.1
"""What waits for the device stand for is reported beside them from this share of the time on."""
MOSTLY_COMPUTING = 0.5
"""A device that computes for this share of the time is named from `LEAST_SHARE` of waits on."""
UNDERFILLED_BOUND = 0.5
"""From this share of the kernel time with one small kernel alone, this is the bound."""
LEAST_SHARE = 0.05
"""Smaller causes are not reported in evidence and advice, nor beside kernels or larger causes."""
MAX_STALLS = 2
"""Causes of stalls that are reported beside kernels."""


def of_kernels(ranked: Sequence[BoundShare]) -> list[BoundShare]:
    """The bounds of the kernels, from shares of the time by what limits them, the largest first.

    One class by itself where the others leave less than `STALLED`, as a device that is stalled for
    less is bound by its kernels. Else each class with that share, and all kernels together: work
    that is saved may have kernels of several classes.
    """
    others = sum(one.share for one in ranked[1:])
    if others < STALLED:
        return list(ranked[:1])
    whole = BoundShare(Bound.KERNELS, ranked[0].share + others)
    if ranked[0].key == Bound.KERNELS:
        return [whole]
    return [*(one for one in ranked if one.share >= STALLED and one.key != Bound.KERNELS), whole]


def with_stalls(
    kernels: Sequence[BoundShare], parts: Iterable[tuple[Bound, float]]
) -> list[BoundShare]:
    """The bounds of a device that is rarely stalled, and the causes of its stalls that are not
    small: two at most. They are what can be gained without faster kernels."""
    stalls = [one for one in _ranked(parts) if one.share >= LEAST_SHARE]
    return [*kernels, *stalls[:MAX_STALLS]]


def _ranked(parts: Iterable[tuple[Bound, float]]) -> list[BoundShare]:
    shares: dict[Bound, float] = defaultdict(float)
    for key, share in parts:
        shares[key] += share
    return sorted((BoundShare(*one) for one in shares.items()), key=lambda one: -one.share)


def _co_dominant_or_large(ranked: Sequence[BoundShare]) -> list[BoundShare]:
    """The first bound, and those about as large or with `LEAST_SHARE` of the time; three at
    most."""
    large = CO_DOMINANT_FRACTION * ranked[0].share if ranked else 0.0
    least = min(large, LEAST_SHARE)
    return [one for one in ranked if one.share >= (large if one.key == Bound.DEVICE else least)][:3]


def ranked_bounds(parts: Iterable[tuple[Bound, float]]) -> list[BoundShare]:
    """The largest bound, and those about as large, from shares of the time by bound."""
    return _co_dominant_or_large(_ranked(parts))
