# SPDX-License-Identifier: Apache-2.0
"""Files of the store that cannot be read: their rows are missing, but no question fails for long.

Files are not checked in advance. Where the engine cannot answer a question, the files of its tables
are read as a whole; damaged ones are left out of this answer and of later ones, counted and logged,
and a header of each answer has how many it lacks. A file that was written again is read again.
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
"""How long the files of one question are read; the next question that fails continues."""
_ROWS_AT_ONCE = 16_384
_State = tuple[int, int, int]
"""See `_state`."""


class DamagedFiles:
    """The damaged files that a server knows. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._damaged: dict[Path, _State] = {}
        self._whole: dict[Path, _State] = {}
        """Files that were read and are not damaged."""

    def __len__(self) -> int:
        return len(self._damaged)

    def among(self, paths: Iterable[Path]) -> set[Path]:
        """Those of the files that are known to be damaged, and were not written again since."""
        if not self._damaged:
            return set()
        with self._mutex:
            known = dict(self._damaged)
        return {path for path in paths if path in known and known[path] == _state(path)}

    def look(self, paths: Iterable[Path]) -> int:
        """Read files that were not read before; returns how many are found to be damaged."""
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
        """How many damaged files the tables lack that were read so far."""
        return len(self._left_out)

    def look(self) -> int:
        """Read the files of the tables that the question reads; returns how many more of them are
        found to be damaged."""
        return self._damaged.look(path for paths in self._asked.values() for path in paths)

    def __getitem__(self, name: str) -> Sequence[Path]:
        paths = self._files[name]
        bad = self._damaged.among(paths)
        self._left_out |= bad
        self._asked[name] = [path for path in paths if path not in bad] if bad else paths
        return self._asked[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _state(path: Path) -> _State | None:
    """(size, inode, time of change), of which one changes when a file is written again; None: it is
    not there."""
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
