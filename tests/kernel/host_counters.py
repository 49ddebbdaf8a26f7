# SPDX-License-Identifier: Apache-2.0
"""Counters of a recording of the host, and the same read beside it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Rows(Protocol):
    """A recorder that has ended, or whatever else answers SQL."""

    def rows(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """The rows of a query."""


def grown(recorder: Rows, series: str, **attributes: object) -> float:
    """How much a counter grew over the recording, all that carry these attributes together."""
    total = 0.0
    for labels, first, last in recorder.rows(
        "SELECT labels, min(value), max(value) FROM metric WHERE series = ? GROUP BY labels", series
    ):
        found = json.loads(labels or "{}")
        if all(found.get(name) == value for name, value in attributes.items()):
            total += last - first
    return total


@contextmanager
def read_beside(read: Callable[[], int]) -> Iterator[list[tuple[int, int]]]:
    """A counter as it is read a hundred times a second in this process: (ns, value)."""
    seen: list[tuple[int, int]] = []
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(0.01):
            seen.append((time.monotonic_ns(), read()))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def grown_beside(
    recorder: Rows, seen: list[tuple[int, int]], series: str, **attributes: object
) -> tuple[float, float]:
    """How much a counter grew between the first and the last reading of the recorder, and how much
    it did between the same two moments by readings of our own."""
    rows = [
        (labels, time_ns, value)
        for labels, time_ns, value in recorder.rows(
            "SELECT labels, time_ns, value FROM metric WHERE series = ? ORDER BY time_ns", series
        )
        if attributes.items() <= json.loads(labels or "{}").items()
    ]
    first = {labels: value for labels, _, value in reversed(rows)}
    final = {labels: value for labels, _, value in rows}
    ends = (rows[0][1], rows[-1][1])
    truths = [next(value for ns, value in seen if ns >= end) for end in ends]
    return sum(final.values()) - sum(first.values()), truths[1] - truths[0]


def last(recorder: Rows, series: str, **attributes: object) -> float:
    return sum(
        float(value)
        for labels, value in recorder.rows(
            "SELECT labels, max_by(value, time_ns) FROM metric WHERE series = ? GROUP BY labels",
            series,
        )
        if attributes.items() <= json.loads(labels or "{}").items()
    )


def settle() -> None:
    """Until counters have been read once more."""
    time.sleep(1.2)
