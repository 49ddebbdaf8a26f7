# SPDX-License-Identifier: Apache-2.0
"""Files of the store that cannot be read: one of them costs its own rows, not every question.

Nobody reads a file to see whether it is whole before it is asked for. A question that the engine
cannot answer has the files of its tables read; what is damaged is left out of it and of all that
follow, counted, logged, and named in number in the head of each answer that lacks it. A file that
was written again counts again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

LOG = logging.getLogger("sonde.server")

LOOK_S = 10.0
"""For the files of one question; the next one that fails goes on."""
_ROWS_AT_ONCE = 16_384
_State = tuple[int, int, int]


class DamagedFiles:
    """Of one server. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._damaged: dict[Path, _State] = {}
        self._whole: dict[Path, _State] = {}

    def __len__(self) -> int:
        return len(self._damaged)

    def are_among(self, paths: Iterable[Path]) -> set[Path]:
        """Those of the files that are known to be damaged."""
        if not self._damaged:
            return set()
        with self._mutex:
            known = dict(self._damaged)
        return {path for path in paths if path in known and known[path] == _state(path)}

    def look(self, paths: Iterable[Path]) -> int:
        """Read files; returns how many are found to be damaged."""
        ends_s = time.monotonic() + LOOK_S
        found = 0
        for path in paths:
            state = _state(path)
            if state is None or state in (self._damaged.get(path), self._whole.get(path)):
                continue
            if time.monotonic() > ends_s:
                break
            why = _damage(path)
            with self._mutex:
                (self._damaged if why else self._whole)[path] = state
                while len(self._whole) > 100_000:
                    del self._whole[next(iter(self._whole))]
            if why:
                found += 1
                LOG.error("%s is damaged, and left out of answers: %s", path, why)
        return found


class WholePaths(Mapping[str, Sequence[Path]]):
    """Files by table, without those that are known to be damaged."""

    def __init__(self, files: Mapping[str, Sequence[Path]], damaged: DamagedFiles) -> None:
        self._files, self._damaged = files, damaged
        self._asked: dict[str, Sequence[Path]] = {}
        self._left_out: set[Path] = set()

    @property
    def left_out(self) -> int:
        """How many files the tables that were asked for lack."""
        return len(self._left_out)

    def look(self) -> int:
        """Read the files of the tables that were asked for; returns how many more are damaged."""
        return self._damaged.look(path for some in self._asked.values() for path in some)

    def __getitem__(self, name: str) -> Sequence[Path]:
        paths = self._files[name]
        bad = self._damaged.are_among(paths)
        self._left_out |= bad
        self._asked[name] = [path for path in paths if path not in bad] if bad else paths
        return self._asked[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _state(path: Path) -> _State | None:
    """What changes when a file is written again; None: it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_ino, found.st_mtime_ns


def _damage(path: Path) -> str:
    """Why a file cannot be read, '' where it can."""
    try:
        with pq.ParquetFile(path) as file:
            for _ in file.iter_batches(_ROWS_AT_ONCE):
                pass
    except (pa.ArrowException, OSError, ValueError) as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""
