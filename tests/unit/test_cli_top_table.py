# SPDX-License-Identifier: Apache-2.0
"""The table of `sonde top`: its order, and what fits into 80 columns."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest

from sonde.agent.top import DeviceShare, Usage
from sonde.cli.top import _show, add_parser, in_order, shown_of, table

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
    usages = [Usage(4194304, "a-long-user-name", name, 64.0, 1 << 40, None)]
    text = table(usages, usages, 80)

    assert name in text
    assert "BUSY" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_with_devices_their_columns_are_there() -> None:
    head, *rows = table(FOUND, FOUND, 80).splitlines()[1:]

    assert "BUSY %" in head
    assert [row.split()[-1] for row in rows] == ["b", "c", "a"]
    assert "50.0" in rows[1]


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["top", *words])


IDLE = Usage(13, "ann", "idle", 0.0, 5 << 20, None)
QUIET = DeviceShare(busy=0.0, launches_per_s=0.0, copied_bytes_per_s=0.0, timed=0)
ATTACHED = Usage(14, "ann", "attached", 0.0, 5 << 20, QUIET)
THREAD = Usage(15, "root", "ksoftirqd/0", 0.25, 0, None, is_kernel=True)


def test_what_used_nothing_and_threads_of_the_kernel_are_counted_not_listed() -> None:
    shown, line = shown_of([*FOUND, IDLE, ATTACHED, THREAD], arguments())

    assert shown == FOUND
    assert "2 processes that used nothing (--idle)" in line
    assert "1 threads of the kernel, 0.25 CPUs busy (--kernel-threads)" in line


def test_they_are_listed_where_they_are_asked_for() -> None:
    everyone = [*FOUND, IDLE, THREAD]

    assert shown_of(everyone, arguments("--idle", "--kernel-threads")) == (everyone, "")
    assert shown_of(everyone, arguments("-p", "13")) == (everyone, "")
    assert IDLE in shown_of(everyone, arguments("--sort", "memory"))[0]


def test_nothing_is_cut_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a-name-of-some-length" * 10
    many = [Usage((1 << 22) + n, "ann", name, 0.5, 3 << 20, DEVICE) for n in range(60)]
    _show(SimpleNamespace(look=lambda: many), arguments("--once"))  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith(f" {name}") for line in lines) == 60
