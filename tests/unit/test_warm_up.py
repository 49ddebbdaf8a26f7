# SPDX-License-Identifier: Apache-2.0
"""The first moments of a recording: until walks lack nothing, and not for ever."""

from __future__ import annotations

import time

import pytest

from sonde.agent import warm_up as warming
from sonde.collect.collector import Batch


class Walker:
    """A collector that has something at each look."""

    name = "cpu"

    def __init__(self, reports_ongoing=False):
        self.drained = []
        self.counted_from = []
        self.reports_ongoing = reports_ongoing

    def drain(self, since_ns, to_the_end):
        self.drained.append((since_ns, to_the_end))
        return Batch(seen=7)

    def count_from_now(self, since_ns):
        self.counted_from.append(since_ns)
        return Batch(seen=2)


def took_s(ends):
    walker = Walker()
    began_s = time.monotonic()
    batches = warming.warm_up([walker], lambda gap_ms: time.sleep(gap_ms / 1e3), ends)
    # What was seen is read once, with what is still going on, so that it counts for nothing later.
    assert [batch.seen for batch in batches] == [7]
    assert [to_the_end for _, to_the_end in walker.drained] == [True]
    return time.monotonic() - began_s


def test_it_is_over_soon_where_walks_lack_nothing():
    assert took_s(lambda: {"entry": 10**6}) >= warming.QUIET_S


def test_what_goes_on_is_read_right_before_the_recording_begins():
    waits, cpu = Walker(reports_ongoing=True), Walker()
    batches = warming.warm_up([waits, cpu], lambda gap_ms: time.sleep(gap_ms / 1e3), dict)
    assert [batch.seen for batch in batches] == [7, 7, 2]
    assert not cpu.counted_from
    assert waits.counted_from[0] >= max(waits.drained[0][0], cpu.drained[0][0])


def test_it_waits_while_walks_lack_something():
    looks = iter(range(10**6))
    # Something is lacking at each of the first 30 looks: the frames of one deep stack.
    lacking = warming.GAP_MS / 1e3 * 30
    assert took_s(lambda: {"table_missing": min(next(looks), 30)}) >= lacking + warming.QUIET_S


@pytest.mark.parametrize("end", ["no_process", "table_missing"])
def test_it_ends_where_there_is_always_something_new(end, monkeypatch):
    clock_s = iter(n / 100 for n in range(10**6))
    monkeypatch.setattr(warming.time, "monotonic", lambda: next(clock_s))
    looks = iter(range(10**6))
    asked = []

    def ends():
        asked.append(next(looks))
        return {end: asked[-1]}

    warming.warm_up([], lambda _: None, ends)
    assert len(asked) == pytest.approx(100 * warming.LONGEST_S, abs=2)
