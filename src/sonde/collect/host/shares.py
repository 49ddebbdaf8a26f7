# SPDX-License-Identifier: Apache-2.0
"""What any user can have more of than is read: shared out between parties."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import zip_longest
from typing import TypeVar

Thing = TypeVar("Thing")


def share_out(
    there: Iterable[tuple[Hashable, Thing]], most: int, is_known: Callable[[Thing], bool]
) -> list[Thing]:
    """`most` of (party, thing): every party gets as many as every other one, as far as it has them,
    and of each those first that were read before."""
    waiting: dict[Hashable, list[Thing]] = {}
    for party, thing in there:
        waiting.setdefault(party, []).append(thing)
    for mine in waiting.values():
        mine.sort(key=lambda one: not is_known(one))
    rounds = zip_longest(*waiting.values())
    return [one for each in rounds for one in each if one is not None][:most]
