# SPDX-License-Identifier: Apache-2.0
"""What the list of a process's mappings leaves of a mapping that is followed."""

from __future__ import annotations

import pytest

from sonde.collect.memory import pieces_of

MAPPED = [(10, 20), (30, 40), (50, 60)]


@pytest.mark.parametrize(
    ("begin", "end", "left"),
    [
        (10, 20, [(10, 20)]),  # all of it
        (12, 18, [(12, 18)]),
        (30, 60, [(30, 40), (50, 60)]),  # a hole
        (5, 55, [(10, 20), (30, 40), (50, 55)]),  # its head is gone, too
        (20, 30, []),  # nothing
        (60, 99, []),
        (0, 10, []),
    ],
)
def test_what_is_left_of_a_mapping(begin, end, left):
    assert pieces_of(MAPPED, begin, end) == left
