# SPDX-License-Identifier: Apache-2.0
"""A collector that fails costs its own rows, is counted, and is reported once."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, cast

import pytest

from sonde.agent.draining import drain
from sonde.collect.collector import Batch, Collector
from sonde.errors import HostError


class Failing:
    name = "memory"

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.batch = Batch()

    def drain(self, since_ns: int, to_the_end: bool) -> Batch:
        if self.error is not None:
            raise self.error
        return self.batch


def collector(error: Exception | None) -> Any:
    return cast(Collector, Failing(error))


def test_an_error_costs_one_interval_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    failed: Counter[str] = Counter()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert drain(collector(OverflowError("too large")), 0, False, failed).seen == 0
    assert failed == {"memory": 3}
    assert [one.message for one in caplog.records] == ["memory gives no rows of this interval"]
    well = collector(None)
    assert drain(well, 0, True, failed) is well.batch


def test_what_the_operator_has_to_know_is_raised() -> None:
    with pytest.raises(HostError):
        drain(collector(HostError("the kernel takes it away", "ask why")), 0, False, Counter())
