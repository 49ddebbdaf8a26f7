# SPDX-License-Identifier: Apache-2.0
"""Files of the kernel that are read again and again, and counters reported when they change."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Container, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from sonde import metrics, procfs
from sonde.collect.polling import NORMAL_S, Points, SourceUnavailable

READ_BYTES = 1 << 20
"""Requested at a time."""
MAX_BYTES = 32 << 20
"""Of a file; the longest is /proc/interrupts of a machine with many CPUs."""
MAX_SERIES = 32_768
"""Series that are remembered as reported. Sources bound what they report well below this: beyond
it a series may be reported although it stands still."""
AGAIN_S = 25.0
"""A counter that stands still is reported again after this long, so that it does not look gone."""


class KernelFile:
    """A file kept open. To read it from its start makes the kernel generate it again."""

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        self._fd = -1
        self.is_kept = True
        """Whether it stays open between reads: quicker, at the price of a descriptor."""

    def read(self, max_bytes: int = MAX_BYTES) -> bytes:
        """Its content now; of one with more than `max_bytes`, whole lines within these. Raises
        SourceUnavailable."""
        raw = bytearray()
        try:
            if self._fd < 0:
                self._fd = procfs.open_file(self._path)
            # A seq_file returns a page or so at a time, however much is requested.
            while len(raw) < max_bytes:
                piece = os.pread(self._fd, min(READ_BYTES, max_bytes - len(raw)), len(raw))
                if not piece:
                    break
                raw += piece
        except OSError as error:
            self.close()
            raise SourceUnavailable(f"{self._path}: {error.strerror}") from error
        if not self.is_kept:
            self.close()
        if len(raw) >= max_bytes:  # a line that is cut off would be another number
            del raw[raw.rfind(b"\n") + 1 :]
        return bytes(raw)

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
        self._last: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()
        """Value, and when it was reported (s); the one that was given longest ago first."""

    def report(self, points: Points, series: str, value: float, labels: str = "") -> None:
        """Add a point unless the series stands still."""
        key = (series, labels)
        now_s = time.monotonic()
        last = self._last.get(key)
        if last is not None:
            self._last.move_to_end(key)
            if last[0] == value and now_s - last[1] < AGAIN_S:
                return
        elif len(self._last) >= MAX_SERIES:
            self._last.popitem(last=False)
        self._last[key] = (value, now_s)
        points.add(series, value, labels)


class UnchangedLines:
    """Lines of counters that are the same as in the last read: their values need not be parsed,
    until it is time to report all of them again. As many are remembered as were read."""

    def __init__(self) -> None:
        self._seen: frozenset[bytes] = frozenset()
        self._again_s = 0.0

    def changed(self, lines: Sequence[bytes]) -> list[bytes]:
        """Those that were not there before, or all of them after AGAIN_S."""
        now_s = time.monotonic()
        before, self._seen = self._seen, frozenset(lines)
        if now_s >= self._again_s:
            # By then `Counters` report a series that stands still, too.
            self._again_s = now_s + AGAIN_S + NORMAL_S
            return list(lines)
        return [line for line in lines if line not in before]


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
