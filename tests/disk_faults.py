# SPDX-License-Identifier: Apache-2.0
"""A store on a disk that loses its power, fills up or fails: tests/programs/store/disk_faults.c.

`python disk_faults.py losses DIR` writes a store and leaves what each sync made durable;
`python disk_faults.py refusals DIR ERROR TRIES` writes stores while calls that change the disk are
refused. Both are run with the library preloaded (`run`); `KeptDisk` makes directories as they are
after a power loss.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from sonde.store import compaction
from sonde.store.catalog import Catalog
from sonde.store.compaction import compact, sweep, sweep_orphans
from sonde.store.flush import Flusher
from sonde.store.record import Record, digest_of
from sonde.store.wal import Wal, WalFailedError
from stored_chunks import as_of, recorded, rows_of

SOURCE = Path(__file__).parent / "programs" / "store" / "disk_faults.c"
NOW_NS = 1_800_001_800 * 10**9
LATER_NS = NOW_NS * 2
ROUNDS, CHUNKS_A_ROUND = 3, 2
FAILURES = (OSError, sqlite3.Error, duckdb.Error, pa.ArrowException)


def small_chunks() -> list[bytes]:
    """The recorded chunks that are quickest to store."""
    return sorted(recorded(), key=len)[:CHUNKS_A_ROUND]


def made_record(number: int, chunks: list[bytes]) -> Record:
    """The number-th record of a store."""
    body = as_of(chunks[number % len(chunks)], "one", number, NOW_NS + number * 10**9)
    return Record("lab", "one", digest_of("lab", "one", body), NOW_NS, body)


def write_store(folder: Path, acknowledged: Callable[[Record], None]) -> None:
    """Append, flush, compact and sweep, going on after failures as a server does."""
    chunks = small_chunks()
    compaction.COMPACTED_FROM = 2
    with contextlib.suppress(*FAILURES):
        catalog = Catalog(folder)
        for turn in range(ROUNDS):
            with contextlib.suppress(*FAILURES):
                _append(folder, turn, chunks, acknowledged)
            with contextlib.suppress(*FAILURES):
                Flusher(folder, catalog).flush()
        for work in (
            lambda: compact(folder, catalog),
            lambda: sweep(folder, catalog, LATER_NS),
        ):
            with contextlib.suppress(*FAILURES):
                work()
        catalog.close()


def _append(
    folder: Path, turn: int, chunks: list[bytes], acknowledged: Callable[[Record], None]
) -> None:
    wal = Wal(folder / "wal")
    for place in range(CHUNKS_A_ROUND):
        record = made_record(turn * CHUNKS_A_ROUND + place, chunks)
        with contextlib.suppress(WalFailedError):
            wal.append(record).result(30)
            acknowledged(record)
    wal.close()


def wrong_in(folder: Path, acknowledged: set[str]) -> list[str]:
    """What is wrong with a store after a restart; `acknowledged`: digests of chunks in hex."""
    chunks = small_chunks()
    rows = {
        one.digest.hex(): rows_of(one.body, "sample")
        for one in (made_record(n, chunks) for n in range(ROUNDS * CHUNKS_A_ROUND))
    }
    catalog = Catalog(folder)
    try:
        sweep_orphans(folder, catalog)
        Flusher(folder, catalog).flush()
        files = catalog.files("lab")
        found: Counter[str] = Counter()
        samples = 0
        problems = []
        for one in files:
            table = pq.read_table(folder / one.path)
            if table.num_rows != one.row_count:
                problems.append(f"{one.path} has {table.num_rows} rows")
            if one.name == "chunk":
                found.update(digest.hex() for digest in table.column("digest").to_pylist())
            if one.name == "sample":
                samples += table.num_rows
        stacks = {one.day for one in files if one.name == "stack"}
        if found and not stacks:
            problems.append("there are no stacks")
    finally:
        catalog.close()
    problems += [f"{digest} was acknowledged and is lost" for digest in acknowledged - set(found)]
    problems += [f"{digest} is stored {n} times" for digest, n in found.items() if n > 1]
    if samples != sum(rows[digest] for digest in found):
        problems.append(f"{samples} rows of samples")
    return problems


def library(folder: Path) -> Path | None:
    """The compiled library; None without a compiler."""
    compiler = shutil.which("gcc")
    if compiler is None:
        return None
    made = folder / "disk_faults.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(made), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return made


def run(shim: Path, mode: str, folder: Path, *arguments: str) -> object:
    """What this module prints as a program with the library preloaded."""
    folder.mkdir(exist_ok=True)
    kept = folder.parent / f"{folder.name}.kept"
    kept.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, __file__, mode, str(folder), *arguments],
        env=os.environ
        | {
            "LD_PRELOAD": str(shim),
            "DISK_FAULTS_DIR": str(folder),
            "DISK_FAULTS_KEPT": str(kept),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    return json.loads(done.stdout)


@dataclass(frozen=True, slots=True)
class Name:
    """A name in a directory."""

    identity: str
    """Inode and when it was made: inodes are used again."""
    is_folder: bool
    path: Path


class KeptDisk:
    """What every sync of a program has made durable."""

    def __init__(self, folder: Path, kept: Path) -> None:
        self._folder, self._kept = folder, kept
        self.syncs = len(list(kept.glob("*.synced")))
        self._synced = [
            kept.joinpath(f"{n}.synced").read_text().rpartition(" ")[0] for n in range(self.syncs)
        ]

    def names(self, number: int) -> list[Name]:
        """The names that there were when a sync was made."""
        found = []
        for line in self._kept.joinpath(f"{number}.tree").read_text().splitlines():
            inode, birth, kind, path = line.split(" ", 3)
            found.append(Name(f"{inode} {birth}", kind == "d", Path(path)))
        return found

    @cached_property
    def _root(self) -> str:
        return next(one.identity for one in self.names(0) if one.path == self._folder)

    def after_power_loss(self, syncs: int, target: Path, *, keeps_names: bool) -> None:
        """Make the directory as it is where the power is lost after `syncs` syncs.

        Of each file what was synced last is left, of one that never was: nothing. Of each directory
        the names at its last sync are left, or with `keeps_names` all, as file systems with a
        journal may do.
        """
        target.mkdir(parents=True)
        if keeps_names:
            for one in self.names(min(syncs, self.syncs - 1)):
                if one.path != self._folder:
                    self._make(one, syncs, target / one.path.relative_to(self._folder))
        else:
            self._make_synced(self._root, syncs, target)

    def _make_synced(self, identity: str, syncs: int, target: Path) -> None:
        last = self._last_sync(identity, syncs)
        if last is None:
            return
        names = self.names(last)
        own = next(one.path for one in names if one.identity == identity)
        for one in names:
            if one.path.parent == own:
                self._make(one, syncs, target / one.path.name)
                if one.is_folder:
                    self._make_synced(one.identity, syncs, target / one.path.name)

    def _make(self, name: Name, syncs: int, target: Path) -> None:
        if name.is_folder:
            target.mkdir(exist_ok=True)
            return
        last = self._last_sync(name.identity, syncs)
        if last is None:
            target.touch()
        else:
            shutil.copyfile(self._kept / f"{last}.data", target)

    def _last_sync(self, identity: str, syncs: int) -> int | None:
        return next((n for n in range(syncs - 1, -1, -1) if self._synced[n] == identity), None)


def _losses(folder: Path) -> object:
    shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
    acknowledged: list[tuple[str, int]] = []
    write_store(
        folder, lambda record: acknowledged.append((record.digest.hex(), shim.disk_faults_syncs()))
    )
    return acknowledged


def _refusals(folder: Path, error: int, tries: int) -> object:
    """Write stores, in each of which another call is refused; a full disk refuses the next ones,
    too. The calls are spread evenly over those that a store takes; the last one is of the log, of
    whose few calls none may be among them."""
    shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
    shim.disk_faults_calls.restype = ctypes.c_long
    count = 12 if error == errno.ENOSPC else 1
    calls, wrong, acks = 0, [], []
    calls_at_acks: list[int] = []

    def acknowledge(record: Record) -> None:
        acknowledged.append(record)
        if not calls:
            calls_at_acks.append(shim.disk_faults_calls())

    for number in range(tries + 2):
        first = 0 if not number else 1 + (calls * (number - 1) + calls // 2) // tries
        if number > tries:
            first = calls_at_acks[len(calls_at_acks) // 2]  # the sync that it waited for
        store = folder / str(first)
        store.mkdir()
        acknowledged: list[Record] = []
        shim.disk_faults_refuse(ctypes.c_long(first), ctypes.c_long(count), error)
        write_store(store, acknowledge)
        calls = calls or shim.disk_faults_calls()
        shim.disk_faults_refuse(ctypes.c_long(0), ctypes.c_long(0), 0)
        digests = {record.digest.hex() for record in acknowledged}
        wrong += [f"call {first}: {problem}" for problem in wrong_in(store, digests)]
        acks.append(len(acknowledged))
        shutil.rmtree(store)
    return {"calls": calls, "acknowledged": acks, "wrong": wrong}


if __name__ == "__main__":
    if sys.argv[1] == "losses":
        result = _losses(Path(sys.argv[2]))
    else:
        result = _refusals(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    sys.stdout.write(json.dumps(result))
