# SPDX-License-Identifier: Apache-2.0
"""Shares out what is read between parties, where any user may have more than is read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import zip_longest
from typing import TypeVar

Thing = TypeVar("Thing")


def share_out(
    there: Iterable[tuple[Hashable, Thing]], limit: int, is_known: Callable[[Thing], bool]
) -> list[Thing]:
    """At most `limit` things of all (party, thing): every party gets the same number, as far as it
    has that many, and first those that were read before (`is_known`)."""
    of_party: dict[Hashable, list[Thing]] = {}
    for party, thing in there:
        of_party.setdefault(party, []).append(thing)
    for things in of_party.values():
        things.sort(key=lambda one: not is_known(one))
    rounds = zip_longest(*of_party.values())
    return [one for each in rounds for one in each if one is not None][:limit]
