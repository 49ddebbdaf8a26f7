# SPDX-License-Identifier: Apache-2.0
"""Equal rows are found as NumPy finds them, without keeping other threads from running."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from sonde.model.distinct_rows import distinct_rows

SOURCES = Path(__file__).parents[2] / "src" / "sonde"
FARTHEST = np.iinfo(np.int64)


@pytest.mark.parametrize(
    "spread", [1, 3, 1 << 20, 1 << 31, 1 << 50, FARTHEST.max], ids=lambda one: f"{one:.0e}"
)
@pytest.mark.parametrize("columns", [1, 2, 3, 6])
def test_rows_are_numbered_and_ordered_as_numpy_does(spread: int, columns: int) -> None:
    random = np.random.default_rng(columns)
    few = random.integers(-spread, spread, (7, columns))
    keys = few[random.integers(0, len(few), 500)]
    keys[:, 0] ^= random.integers(0, 2, len(keys))
    rows, inverse = distinct_rows(list(keys.T))
    expected, numbers = np.unique(keys, axis=0, return_inverse=True)
    assert rows.tolist() == expected.tolist()
    assert inverse.tolist() == numbers.reshape(-1).tolist()


def test_the_whole_range_of_numbers_is_distinguished() -> None:
    ends = np.array([FARTHEST.min, FARTHEST.max, 0, -1, FARTHEST.min])
    rows, inverse = distinct_rows([ends, ends[::-1], np.array([True, False, True, False, True])])
    assert [row[0] for row in rows.tolist()] == sorted(row[0] for row in rows.tolist())
    assert [tuple(rows[one, :2].tolist()) for one in inverse] == list(
        zip(ends.tolist(), ends[::-1].tolist(), strict=True)
    )


def test_no_rows_are_no_rows() -> None:
    rows, inverse = distinct_rows([np.array([], np.int32)] * 3)
    assert rows.shape == (0, 3)
    assert inverse.shape == (0,)


def test_other_threads_run_meanwhile() -> None:
    random = np.random.default_rng(1)
    columns = [random.integers(0, 1 << 40, 1_000_000) for _ in range(3)]
    longest_s, ended = 0.0, threading.Event()

    def beat() -> None:
        nonlocal longest_s
        while not ended.is_set():
            begun_s = time.monotonic()
            time.sleep(0.005)
            longest_s = max(longest_s, time.monotonic() - begun_s)

    thread = threading.Thread(target=beat)
    thread.start()
    distinct_rows(columns)
    ended.set()
    thread.join()
    assert longest_s < 1  # compared as records: two seconds and more


def test_no_rows_are_compared_as_records_in_answers() -> None:
    compared = [
        path.name
        for folder in ("analyze", "query", "export", "model")
        for path in sorted((SOURCES / folder).rglob("*.py"))
        if "np.unique(" in (text := path.read_text())
        and any("axis=0" in part.split(")\n")[0] for part in text.split("np.unique(")[1:])
    ]
    assert compared == []
