# SPDX-License-Identifier: Apache-2.0
"""The table of `sonde top`: its order, and what fits into 80 columns."""

from __future__ import annotations

import pytest

from sonde.agent.top import DeviceShare, Usage
from sonde.cli.top import in_order, table

DEVICE = DeviceShare(busy=0.5, launches_per_s=2e4, copied_bytes_per_s=3e9, timed=100)
FOUND = [
    Usage(11, "ann", "b", 0.5, 3 << 20, None),
    Usage(12, "bob", "c", 1.5, 1 << 20, DEVICE),
    Usage(10, "eve", "a", 0.1, 9 << 20, None),
]


@pytest.mark.parametrize(
    ("key", "pids"),
    [
        ("busy", [11, 12, 10]),
        ("cpu", [12, 11, 10]),
        ("memory", [10, 11, 12]),
        ("device", [12, 11, 10]),
        ("pid", [10, 11, 12]),
        ("name", [10, 11, 12]),
    ],
)
def test_processes_come_in_the_order_asked_for(key: str, pids: list[int]) -> None:
    assert [one.pid for one in in_order(FOUND, key)] == pids


def test_without_devices_80_columns_have_room_for_a_name() -> None:
    name = "a-name-of-thirty-eight-characters-long"
    text = table([Usage(4194304, "a-long-user-name", name, 64.0, 1 << 40, None)], 5, 80)

    assert name in text
    assert "BUSY" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_with_devices_their_columns_are_there() -> None:
    head, *rows = table(FOUND, 5, 80).splitlines()[1:]

    assert "BUSY %" in head
    assert [row.split()[-1] for row in rows] == ["b", "c", "a"]
    assert "50.0" in rows[1]
