# SPDX-License-Identifier: Apache-2.0
"""Launches beside a contention of about their size: what is certain comes first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sonde.analyze.slowed_launches import without_hand_overs
from sonde.model.causes import Cause
from sonde.model.verdict import CauseShare

WINDOW = 1_000_000_000


def share(cause: Cause, part: float, *facts: str) -> CauseShare:
    return replace(CauseShare.empty(cause), ns=round(part * WINDOW), share=part, facts=list(facts))


@pytest.mark.parametrize(
    ("waits", "facts", "count", "launches", "unknown"),
    [
        (0.4, ("held by python (7)",), 400, 0.4, 0.1),
        (0.4, ("held by python (7)",), 100, 0.45, 0.05),  # half a millisecond each at most
        (0.4, (), 400, 0.5, 0.0),  # nobody is known to have had it
        (0.2, ("held by python (7)",), 400, 0.5, 0.0),  # launches are far larger
        (0.6, ("held by python (7)",), 400, 0.5, 0.0),  # the contention is larger anyway
    ],
)
@pytest.mark.parametrize("cause", [Cause.GIL, Cause.RUN_QUEUE])
def test_launches_that_hand_overs_may_have_slowed(cause, waits, facts, count, launches, unknown):
    causes = [share(Cause.LAUNCH, 0.5), share(cause, waits, *facts)]

    found = without_hand_overs(causes, {cause: count}, WINDOW)
    shares = {one.key: one.share for one in found}

    assert shares[Cause.LAUNCH] == pytest.approx(launches)
    assert shares.get(Cause.UNKNOWN, 0.0) == pytest.approx(unknown)
    assert sum(shares.values()) == pytest.approx(0.5 + waits)
    if unknown == 0.1:
        assert found[0].key == cause
