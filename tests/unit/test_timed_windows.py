# SPDX-License-Identifier: Apache-2.0
"""Which runs lie in stretches of time in which everything was timed."""

from __future__ import annotations

import pyarrow as pa

from sonde.query.timed_windows import SINGLE, window_of, windows_ns

MS = 1_000_000


def runs(*rows):
    """(start in ms, weight, pid, window); each takes 1 ms."""
    start, weight, pid, window = zip(*rows, strict=True)
    return pa.table(
        {
            "start_time_ns": pa.array([s * MS for s in start], pa.uint64()),
            "end_time_ns": pa.array([(s + 1) * MS for s in start], pa.uint64()),
            "weight": pa.array(weight, pa.float64()),
            "pid": pa.array(pid, pa.uint32()),
            "window": pa.array(window, pa.uint32()),
        }
    )


def times_of(table):
    return [
        table.column(name).to_numpy().astype("int64") for name in ("start_time_ns", "end_time_ns")
    ]


def test_all_of_a_process_is_one_stretch():
    table = runs(*((10 * n, 1.05, 7, 0) for n in range(20)))
    window = window_of(table)
    assert set(window) == {0}
    assert windows_ns(table, window, *times_of(table)) == []


def test_between_runs_that_stand_for_several_only_long_stretches_count():
    table = runs(
        (0, 1.0, 7, 0), (5, 20.0, 7, 0), (8, 1.0, 7, 0), (9, 12.0, 7, 0),
        *((20 + 10 * n, 1.0, 7, 0) for n in range(12)),
    )  # fmt: skip
    window = window_of(table)
    assert list(window[:4]) == [SINGLE] * 4
    assert len(set(window[4:])) == 1 and window[4] > 0
    kept = table.filter(pa.array(window != SINGLE))
    assert windows_ns(kept, window[window != SINGLE], *times_of(kept)) == [(20 * MS, 131 * MS)]


def test_processes_are_distinguished_and_windows_stay():
    table = runs(
        *((10 * n, 30.0, 7, 0) for n in range(20)),
        *((10 * n, 1.0, 8, 0) for n in range(20)),
        *((10 * n, 30.0, 9, 3) for n in range(20)),
    )
    window = window_of(table)
    assert list(window) == [SINGLE] * 20 + [0] * 20 + [3] * 20


def test_a_stretch_in_which_chosen_launches_were_lost_is_no_window():
    table = runs((0, 5.0, 7, 0), *((10 * n, 1.0, 7, 0) for n in range(1, 60)))
    lossy = [(200 * MS, 310 * MS)]
    window = window_of(table, lossy)
    assert set(window[21:32]) == {SINGLE}, "those of that time"
    assert len(set(window[1:20])) == 1 and len(set(window[33:])) == 1 and window[1] != window[33]
    kept = table.filter(pa.array(window != SINGLE))
    assert windows_ns(kept, window[window != SINGLE], *times_of(kept)) == [
        (10 * MS, 201 * MS), (320 * MS, 591 * MS),
    ]  # fmt: skip


def test_a_stretch_is_a_window_from_100_ms_and_8_runs_on():
    def between(count, last_ms):
        table = runs(
            *((0, 20.0, 7, 0), (1000, 20.0, 7, 0)),
            *((100 + n, 1.0, 7, 0) for n in range(count - 1)),
            *((100 + last_ms, 1.0, 7, 0),),
        )
        return window_of(table)[2]

    assert between(8, 99) > 0
    assert between(8, 98) == SINGLE
    assert between(7, 99) == SINGLE


def test_a_single_window_has_its_begin_and_end():
    table = runs((5, 9.0, 7, 1), (2, 9.0, 7, 1), (9, 9.0, 7, 1))
    assert windows_ns(table, window_of(table), *times_of(table)) == [(2 * MS, 10 * MS)]
