# SPDX-License-Identifier: Apache-2.0
"""Places of requests: two tenants that take all they can leave room for others."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from sonde.server.service import RefusedRequestError
from sonde.server.turns import FIRST_PLACES, Places


def taken(places: Places, stack: ExitStack, tenant: str, most: int = 1_000) -> int:
    """How many places a tenant gets, which asks for one after another."""
    for number in range(most):
        try:
            stack.enter_context(places.place(tenant))
        except RefusedRequestError:
            return number
    return most


def test_one_tenant_gets_its_part():
    with ExitStack() as stack:
        assert taken(Places(32, 16), stack, "a") == 16


@pytest.mark.parametrize("attackers", [1, 2, 5, 40])
def test_tenants_that_take_all_they_can_leave_room(attackers):
    places = Places(32, 16)
    with ExitStack() as stack:
        for number in range(attackers):
            taken(places, stack, f"attacker {number}")
        assert taken(places, stack, "victim") >= (6 if attackers <= 2 else 1)


def test_first_places_are_bounded_and_all_come_back():
    places = Places(2, 2)
    with ExitStack() as stack:
        got = [taken(places, stack, f"t{number}", 1) for number in range(FIRST_PLACES + 50)]
        assert sum(got) == FIRST_PLACES + 2
    with ExitStack() as stack:
        assert taken(places, stack, "a") == 2
