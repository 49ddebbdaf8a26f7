# SPDX-License-Identifier: Apache-2.0
"""Whose processes are left out where too many carry the library, and what one may claim."""

from __future__ import annotations

import os
from typing import Any, cast

from sonde import procfs
from sonde.collect.collector import Batch
from sonde.collect.device_process import (
    BEFORE_S,
    MAX_LOST_A_SECOND,
    MOST_AT_ONCE,
    DeviceProcess,
)
from sonde.collect.device_records import MAX_PARTIES, REPORT_S, RunReader
from sonde.model.rows import EventRow

SECOND_NS = 1_000_000_000
ME = procfs.party_of(os.getpid())


def notices(reader: RunReader, now_ns: int) -> list[EventRow]:
    batch = Batch()
    reader.add_notices(now_ns, batch)
    return [row for row in batch.records(EventRow) if row.name == "rings_left_out"]


def test_rings_left_out_are_reported_by_party() -> None:
    reader = RunReader()
    for party in (ME, ME, 65534):
        reader.leave_out(party)

    first, second = notices(reader, 100 * SECOND_NS)

    assert (first.value, second.value) == (2, 1)
    assert procfs.name_of(ME) in first.text
    assert procfs.name_of(65534) in second.text
    assert reader.losses == {"rings_left_out": 3}


def test_they_are_reported_now_and_then_and_each_once() -> None:
    reader = RunReader()
    reader.leave_out(ME)
    assert len(notices(reader, 100 * SECOND_NS)) == 1
    reader.leave_out(ME)
    assert notices(reader, 101 * SECOND_NS) == []
    later_ns = int((101 + REPORT_S) * SECOND_NS)
    assert [row.value for row in notices(reader, later_ns)] == [1]
    assert notices(reader, 2 * later_ns) == []


def test_any_number_of_parties_takes_a_bounded_number_of_rows() -> None:
    reader = RunReader()
    for party in range(1000, 1000 + 4 * MAX_PARTIES):
        reader.leave_out(party)
    rows = notices(reader, 100 * SECOND_NS)

    assert len(rows) <= MAX_PARTIES + 1
    assert sum(row.value for row in rows) == 4 * MAX_PARTIES


def test_a_process_claims_no_more_of_devices_than_there_is() -> None:
    nothing = cast(Any, None)
    process = DeviceProcess(nothing, nothing, (7, 7), {}, True, nothing, nothing)
    now_ns = 500 * SECOND_NS

    assert process.has_time_for(1e9 * MOST_AT_ONCE * BEFORE_S / 2, now_ns)
    assert not process.has_time_for(1e20, now_ns)  # the weight of a forged record
    assert process.has_time_for(1e9 * MOST_AT_ONCE * BEFORE_S / 2, now_ns)
    assert not process.has_time_for(1e9, now_ns)  # its minute is used up
    assert process.has_time_for(1e9 * MOST_AT_ONCE, now_ns + SECOND_NS)


def test_a_process_that_has_just_begun_claims_for_a_second() -> None:
    nothing = cast(Any, None)
    process = DeviceProcess(nothing, nothing, (7, 499 * SECOND_NS), {}, True, nothing, nothing)

    assert not process.has_time_for(1e9 * MOST_AT_ONCE * 2, 500 * SECOND_NS)
    assert process.has_time_for(1e9 * MOST_AT_ONCE, 500 * SECOND_NS)


def test_a_process_loses_no_more_than_it_can_have_launched() -> None:
    nothing = cast(Any, None)
    process = DeviceProcess(nothing, nothing, (7, 7), {}, True, nothing, nothing)
    now_ns, most = 500 * SECOND_NS, int(MAX_LOST_A_SECOND * BEFORE_S)

    assert process.can_have_lost("lost_ring", 1_000, now_ns) == 1_000
    assert process.can_have_lost("lost_ring", 105_000_000_000, now_ns) == most - 1_000
    assert process.can_have_lost("lost_ring", 1, now_ns) == 0
    assert process.can_have_lost("lost_pool", 1, now_ns) == 1
    assert process.can_have_lost("lost_ring", 1 << 60, now_ns + SECOND_NS) == MAX_LOST_A_SECOND
    assert process.can_have_lost("yielded_ms", 1 << 31, now_ns) == BEFORE_S * 1_000
