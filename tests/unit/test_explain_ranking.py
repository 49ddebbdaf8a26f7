# SPDX-License-Identifier: Apache-2.0
"""Which bounds a verdict has, by their shares of the time."""

from __future__ import annotations

import pytest

from sonde.analyze.ranking import (
    CO_DOMINANT_FRACTION,
    LEAST_SHARE,
    STALLED,
    of_kernels,
    ranked_bounds,
    with_stalls,
)
from sonde.model.causes import Bound
from sonde.model.verdict import BoundShare


@pytest.mark.parametrize(
    ("largest", "second", "is_named"),
    [
        (0.6, LEAST_SHARE, True),
        (0.6, LEAST_SHARE - 0.001, False),
        (0.08, 0.08 * CO_DOMINANT_FRACTION, True),
        (0.08, 0.045, False),
    ],
)
def test_a_second_cause_counts_from_a_twentieth_of_the_time_or_about_as_large(
    largest, second, is_named
):
    """As one does beside kernels."""
    found = ranked_bounds([(Bound.ALLOCATION, second), (Bound.LAUNCH, largest)])

    assert [one.key for one in found] == [Bound.LAUNCH, *[Bound.ALLOCATION] * is_named]


def test_parts_of_one_bound_count_together_and_three_bounds_are_enough():
    parts = [(Bound.LOCK, 0.06), (Bound.LOCK, 0.06), (Bound.IO, 0.3)]
    assert [one.key for one in ranked_bounds(parts)] == [Bound.IO, Bound.LOCK]
    more = [(Bound.HOST, 0.2), (Bound.INPUT, 0.15)]
    assert [one.key for one in ranked_bounds([*parts, *more])] == [
        Bound.IO,
        Bound.HOST,
        Bound.INPUT,
    ]


@pytest.mark.parametrize(("share", "is_named"), [(LEAST_SHARE, True), (LEAST_SHARE - 0.001, False)])
def test_a_cause_of_stalls_beside_kernels_counts_from_a_twentieth(share, is_named):
    found = with_stalls([BoundShare(Bound.COMPUTE, 0.9)], [(Bound.COPY, share)])

    assert [one.key for one in found] == [Bound.COMPUTE, *[Bound.COPY] * is_named]


@pytest.mark.parametrize(
    ("ranked", "named"),
    [
        ([(Bound.COMPUTE, 0.6), (Bound.MEMORY, STALLED - 0.01)], [(Bound.COMPUTE, 0.6)]),
        (
            [(Bound.COMPUTE, 0.45), (Bound.MEMORY, 0.25)],
            [(Bound.COMPUTE, 0.45), (Bound.MEMORY, 0.25), (Bound.KERNELS, 0.7)],
        ),
        (
            [(Bound.MEMORY, 0.5), (Bound.COMPUTE, 0.1), (Bound.KERNELS, 0.1)],
            [(Bound.MEMORY, 0.5), (Bound.KERNELS, 0.7)],
        ),
        ([(Bound.KERNELS, 0.4), (Bound.COMPUTE, 0.3)], [(Bound.KERNELS, 0.7)]),
    ],
)
def test_kernels_of_several_classes_are_named_together_too(ranked, named):
    """Work that is saved may have kernels of each: a network's layers are products and elementwise
    work by turns."""
    found = of_kernels([BoundShare(*one) for one in ranked])

    assert [(one.key, pytest.approx(one.share)) for one in found] == named
