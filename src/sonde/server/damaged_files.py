# SPDX-License-Identifier: Apache-2.0
"""Files of the store that cannot be read: their rows are missing, but no question fails for long.

Files are not checked in advance. Where the engine cannot answer a question, the files of its tables
are read to their ends; damaged ones are left out of this answer and of later ones, counted and
logged, and a header of each answer has how many it lacks. A file that was written again is read
again; one that is gone (compacted, or too old) is forgotten. (The engine is DuckDB.)
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
"""For so long files of one question are begun to be read, each to its end; the next question that
fails continues."""
MAX_DAMAGED = 10_000
MAX_INTACT = 100_000
"""Files that are remembered; where there are more, those found first are forgotten, and read again
when a question fails."""
_ROWS_AT_ONCE = 16_384
_State = tuple[int, int, int]
"""See `_state`."""


class DamagedFiles:
    """The damaged files that a server knows, and those that it knows to be intact. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._damaged: dict[Path, _State] = {}
        self._intact: dict[Path, _State] = {}

    def __len__(self) -> int:
        """How many damaged files there are that were not removed or written again since."""
        with self._mutex:
            known = list(self._damaged.items())
        gone = [(path, state) for path, state in known if _state(path) != state]
        with self._mutex:
            for path, state in gone:
                if self._damaged.get(path) == state:
                    del self._damaged[path]
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
            if state is None or state in (self._damaged.get(path), self._intact.get(path)):
                continue
            if time.monotonic() > ends_s:
                break
            why = _damage(path)
            with self._mutex:
                (self._damaged if why else self._intact)[path] = state
                (self._intact if why else self._damaged).pop(path, None)
                for known, most in ((self._damaged, MAX_DAMAGED), (self._intact, MAX_INTACT)):
                    while len(known) > most:
                        del known[next(iter(known))]
            if why:
                found += 1
                LOG.error("%s is damaged, and left out of answers: %s", path, why)
        return found


class IntactPaths(Mapping[str, Sequence[Path]]):
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
    """(size, inode, time of modification), of which one changes when a file is written again; None:
    it is not there."""
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
