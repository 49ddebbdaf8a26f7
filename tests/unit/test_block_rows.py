# SPDX-License-Identifier: Apache-2.0
"""Rows of block devices, from what the kernel counted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from sonde.collect.blocks import FIELDS, MINOR_BITS, BlockCollector
from sonde.procfs import START_UNIT_NS
from sonde.sinks.chunk import columns_of

START_NS = 7 * START_UNIT_NS
NO_DISK = 4000 << MINOR_BITS | 9


def drained(*rows):
    collector = BlockCollector.__new__(BlockCollector)
    collector._devices = {}
    collector._bpf = SimpleNamespace(drain=lambda name: list(rows) if name == "requests" else [])
    batch = collector.drain(5, to_the_end=False)
    columns = columns_of("activity")
    return batch, [dict(zip(columns, row, strict=True)) for row in batch.rows["activity"]]


def request(tgid=42, device=NO_DISK, operation=0, group=77, count=3):
    """3 requests: 100 ns in the queue, 30 ns in the device, the longest 90 ns."""
    sums = (count, 4096, 100, 30, 90)
    row = (tgid, device, START_NS + 12_345, group, 1, operation, *sums)
    assert len(row) == len(FIELDS)
    return row


def test_time_of_a_request_is_that_in_the_queue_and_in_the_device():
    batch, (block, queue) = drained(request())
    assert (block["kind"], block["ns"], block["max_ns"]) == ("block", 130, 90)
    assert (queue["kind"], queue["ns"], queue["max_ns"]) == ("block-queue", 100, 0)
    for row in (block, queue):
        assert (row["name"], row["op"], row["count"], row["bytes"]) == ("4000:9", "read", 3, 4096)
        assert (row["pid"], row["start_ns"], row["tid"]) == (42, START_NS, 42)
    assert batch.threads == {(42, START_NS, 42)}
    assert batch.seen == 3


def test_a_request_of_the_kernels_own_counts_for_its_control_group_alone():
    batch, rows = drained(request(tgid=0, operation=1), request(operation=1))
    assert {row["pid"] for row in rows} == {42}
    assert batch.group_io == {(1, 77, "4000:9", "write"): (6, 8192, 200, 60)}


def test_operations_without_a_name_are_numbered():
    _, rows = drained(request(operation=33))
    assert rows[0]["op"] == "operation 33"


def test_a_disk_is_called_by_its_name():
    for one in Path("/sys/dev/block").iterdir():
        major, minor = map(int, one.name.split(":"))
        _, rows = drained(request(device=major << MINOR_BITS | minor))
        assert rows[0]["name"] == one.readlink().name
        return
    pytest.skip("needs a block device")
