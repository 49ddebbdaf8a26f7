# SPDX-License-Identifier: Apache-2.0
"""Files of the kernel that are read again and again, and counters reported when they change."""

from __future__ import annotations

import os
import time
from collections.abc import Container
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from sonde import metrics
from sonde.collect.polling import NORMAL_S, Points, SourceUnavailable

READ_BYTES = 1 << 20
"""Requested at a time."""
MAX_SERIES = 32_768
"""Series, or lines, that are remembered as reported."""
AGAIN_S = 25.0
"""A counter that stands still is reported again after this long, so that it does not look gone."""


class KernelFile:
    """A file kept open. To read it from its start makes the kernel generate it again."""

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        self._fd = -1
        self.is_kept = True
        """Whether it stays open between reads: quicker, at the price of a descriptor."""

    def read(self) -> bytes:
        """Its content now. Raises SourceUnavailable."""
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            raw = os.pread(self._fd, READ_BYTES, 0)
            # A seq_file returns a page or so at a time, however much is requested.
            while piece := os.pread(self._fd, READ_BYTES, len(raw)):
                raw += piece
        except OSError as error:
            self.close()
            raise SourceUnavailable(f"{self._path}: {error.strerror}") from error
        if not self.is_kept:
            self.close()
        return raw

    def close(self) -> None:
        """Close it; the next read opens it again."""
        if self._fd >= 0:
            with suppress(OSError):
                os.close(self._fd)
            self._fd = -1


class Counters:
    """Reports values of cumulative series: the first one, each that changed, and any after
    AGAIN_S."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], tuple[float, float]] = {}

    def report(self, points: Points, series: str, value: float, labels: str = "") -> None:
        """Add a point unless the series stands still."""
        key = (series, labels)
        now_s = time.monotonic()
        last = self._last.get(key)
        if last is not None and last[0] == value and now_s - last[1] < AGAIN_S:
            return
        if len(self._last) >= MAX_SERIES:
            self._last.clear()  # report all of them once more
        self._last[key] = (value, now_s)
        points.add(series, value, labels)


class UnchangedLines:
    """Lines of counters that are the same as before: their values need not be parsed, until it is
    time to report all of them again."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self._again_s = 0.0

    def holds(self, line: bytes) -> bool:
        """Whether this very line was there before, and was reported lately."""
        if line in self._seen and time.monotonic() < self._again_s:
            return True
        if time.monotonic() >= self._again_s or len(self._seen) >= MAX_SERIES:
            self._seen.clear()
            # By then `Counters` report a series that stands still, too.
            self._again_s = time.monotonic() + AGAIN_S + NORMAL_S
        self._seen.add(line)
        return False


def table(raw: bytes, wanted: Container[bytes] | None = None) -> dict[str, int]:
    """Lines of `name value`, as in vmstat, cpu.stat and memory.stat; all, or those wanted."""
    found = {}
    for line in raw.split(b"\n"):
        name, _, value = line.partition(b" ")
        if wanted is None or name in wanted:
            with suppress(ValueError):
                found[name.decode("ascii", "replace")] = int(value)
    return found


@lru_cache(maxsize=16_384)
def labels(**attributes: object) -> str:
    """As `sonde.metrics.labels`, remembered: sources repeat the same ones."""
    return metrics.labels(**attributes)
