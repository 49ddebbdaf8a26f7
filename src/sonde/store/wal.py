# SPDX-License-Identifier: Apache-2.0
"""The write-ahead log of one server: many callers, one writer, one fsync for all that waited.

```
DIR/wal/secret            32 bytes that heads of records are keyed by, the same for all servers
DIR/wal/ID/lock           locked (flock) as long as the server's process lives; ID is random
DIR/wal/ID/N.open         being written
DIR/wal/ID/N.wal          sealed: the flusher may read it, and removes it once it is catalogued
DIR/wal/later             what the flusher has put off (put_off.py)
```

What `append` has returned is on the disk: written, synced, in a directory that was synced. Where
the disk refuses a write the file is cut back to its last synced end; where it refuses a sync the
file is given up, because what a failed fsync left behind cannot be known. In both cases nothing of
that group is acknowledged, and the next group tries again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import secrets
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from sonde.errors import SinkError
from sonde.store.record import Record, encode

OPEN, SEALED = ".open", ".wal"
LATER = "later"
SECRET_BYTES = 32
SEGMENT_BYTES = 32 << 20
"""A segment of this size is sealed."""
SEGMENT_S = 10.0
"""A segment of this age is sealed: questions can find a chunk only when its segment was flushed."""
YOUNG_S, YOUNG_SEGMENT_S = 60.0, 2.0
"""In a server's first minute segments are sealed sooner: somebody waits for its first answer."""
GROUP_BYTES = 8 << 20
"""Records of about this size together are written with one fsync at most."""
WAITING_BYTES = 64 << 20
"""Beyond this size of waiting records, callers are refused."""
RECORD_BYTES = 16 << 10
"""Added to the size of each record in `left_bytes`: storing a record takes as long as storing this
many bytes more."""
LOOK_S = 1.0
"""How often it is checked which segments are stored."""


class WalBusyError(SinkError):
    """Too many records wait for the disk; try again later."""


class WalFailedError(SinkError):
    """The disk refused; nothing of this was acknowledged."""


@dataclass(slots=True)
class WalCounters:
    """What the log has done."""

    records: int = 0
    record_bytes: int = 0
    syncs: int = 0
    sync_ns: int = 0
    longest_sync_ns: int = 0
    failures: int = 0
    refused: int = 0
    error: str = ""
    """Of the last group; '' if it was written."""


@dataclass(slots=True)
class _Waiting:
    """A record that is not synced yet; `parts`: encoded."""

    tenant: str
    parts: list[bytes]
    size_bytes: int
    done: Future[None] = field(default_factory=Future)


class Wal:
    """The log of this server. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        segment_bytes: int = SEGMENT_BYTES,
        segment_s: float = SEGMENT_S,
        on_sealed: Callable[[], None] = lambda: None,
    ) -> None:
        """`folder`: DIR/wal. Raises OSError where it cannot be made."""
        name = uuid.uuid4().hex
        self.folder = folder / name
        draft = folder / f".{name}"
        draft.mkdir(parents=True, mode=0o700)
        self._lock_fd = os.open(draft / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.rename(self.folder)  # held before others see it
        self._secret = secret_of(folder)
        sync_folder(folder)
        sync_folder(folder.parent)
        self._segment_bytes, self._segment_s = segment_bytes, segment_s
        self._on_sealed = on_sealed
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._mutex = threading.Lock()
        self.counters = WalCounters()
        self._of_segment: dict[Path, Counter[str]] = {}
        """Bytes of each tenant in each segment that is not stored yet."""
        self._left: Counter[str] = Counter()
        """Bytes of each tenant in all of them."""
        self._put_off: Counter[str] = Counter()
        """Bytes of each tenant that the flusher has put off, of all servers of the directory."""
        self._looked_at = time.monotonic()
        self._fd = -1
        """Of the open segment, as the next four; -1: none is open."""
        self._path = self.folder
        self._number = 0
        self._synced = 0
        """Bytes that are on the disk."""
        self._opened_at = 0.0
        self._made_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="sonde-wal", daemon=True)
        self._thread.start()

    def append(self, record: Record) -> Future[None]:
        """Append a record; the result is there when it is synced, or WalFailedError.

        Raises WalBusyError at once where too much waits.
        """
        parts = encode(record, self._secret)
        one = _Waiting(record.tenant, parts, sum(map(len, parts)))
        with self._mutex:
            if self._waiting_bytes + one.size_bytes > WAITING_BYTES:
                self.counters.refused += 1
                raise WalBusyError("the disk of the server is behind", "try again in some seconds")
            self._waiting_bytes += one.size_bytes
        self._queue.put(one)
        return one.done

    def left_bytes(self, tenant: str) -> tuple[int, int]:
        """(bytes of a tenant, bytes of all tenants) in this log that are not stored yet, up to a
        second old, and those that were put off. A record counts for `RECORD_BYTES` more than its
        size, until it is put off."""
        with self._mutex:
            now = time.monotonic()
            if now - self._looked_at > LOOK_S:
                self._looked_at = now
                for path in [one for one in self._of_segment if not _is_there(one)]:
                    self._left.subtract(self._of_segment.pop(path))
                    self._left = +self._left
                self._put_off = _later_bytes(self.folder.parent)
            own = self._left[tenant] + self._put_off[tenant]
            return own, self._left.total() + self._put_off.total()

    def close(self) -> None:
        """Write what waits, seal the segment and release the lock."""
        self._queue.put(None)
        self._thread.join()
        os.close(self._lock_fd)

    def _run(self) -> None:
        ended = False
        while not ended:
            group, ended = self._next_group()
            if group:
                self._write_group(group)
            if self._fd >= 0 and (
                ended or self._seal_in_s() <= 0 or self._synced >= self._segment_bytes
            ):
                self._seal()

    def _seal_in_s(self) -> float:
        """Seconds until the open segment is old enough."""
        now = time.monotonic()
        young = now - self._made_at < YOUNG_S
        age_s = min(self._segment_s, YOUNG_SEGMENT_S) if young else self._segment_s
        return self._opened_at + age_s - now

    def _next_group(self) -> tuple[list[_Waiting], bool]:
        """(records to write together, whether `close` was called)."""
        group: list[_Waiting] = []
        size = 0
        try:
            one = self._queue.get(timeout=max(0.0, self._seal_in_s()) if self._fd >= 0 else None)
            while one is not None:
                group.append(one)
                size += one.size_bytes
                if size >= GROUP_BYTES:
                    return group, False
                one = self._queue.get_nowait()
        except queue.Empty:
            return group, False
        return group, True

    def _write_group(self, group: list[_Waiting]) -> None:
        size = sum(one.size_bytes for one in group)
        error: OSError | None = None
        try:
            if self._fd < 0:
                self._open()
            self._write(b"".join(part for one in group for part in one.parts))
        except OSError as failed:
            error = failed
            self._cut_back()
        if error is None:
            started = time.perf_counter_ns()
            try:
                os.fdatasync(self._fd)
                self._synced += size
                self.counters.syncs += 1
                took_ns = time.perf_counter_ns() - started
                self.counters.sync_ns += took_ns
                self.counters.longest_sync_ns = max(self.counters.longest_sync_ns, took_ns)
            except OSError as failed:
                error = failed
                self._give_up()
        with self._mutex:
            self._waiting_bytes -= size
            if error is None:
                added: Counter[str] = Counter()
                for one in group:
                    added[one.tenant] += one.size_bytes + RECORD_BYTES
                self._of_segment.setdefault(self._path, Counter()).update(added)
                self._left.update(added)
        counters = self.counters
        counters.error = "" if error is None else error.strerror or str(error)
        if error is None:
            counters.records += len(group)
            counters.record_bytes += size
        else:
            counters.failures += 1
        for one in group:
            if error is None:
                one.done.set_result(None)
            else:
                one.done.set_exception(
                    WalFailedError(
                        f"the server cannot write its log: {counters.error}",
                        "free space on the disk of the server; the agent will send it again",
                    )
                )

    def _open(self) -> None:
        self._number += 1
        path = self.folder / f"{self._number:012d}{OPEN}"
        fd = create(path)
        try:
            sync_folder(self.folder)
        except OSError:  # nothing may be acknowledged in a file whose name is not durable
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        self._path, self._fd = path, fd
        self._synced = 0
        self._opened_at = time.monotonic()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def _cut_back(self) -> None:
        """Truncate the segment to what was synced."""
        if self._fd < 0:
            return
        try:
            os.ftruncate(self._fd, self._synced)
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        """Seal the segment as it is: its records are whole or found damaged."""
        self._seal()

    def _seal(self) -> None:
        os.close(self._fd)
        self._fd = -1
        try:
            self._path.rename(self._path.with_suffix(SEALED))
            sync_folder(self.folder)
        except OSError as error:  # the next owner of this folder seals it
            self.counters.error = error.strerror or str(error)
        self._on_sealed()


def _is_there(segment: Path) -> bool:
    return segment.exists() or segment.with_suffix(SEALED).exists()


def create(path: Path) -> int:
    """The descriptor of a new segment, which the caller closes. Raises OSError."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_APPEND, 0o600)


def later_segments(folder: Path) -> list[Path]:
    """The segments in DIR/wal that were put off, oldest first."""
    return sorted((folder / LATER).glob(f"*{SEALED}"))


def tenant_of(later: Path) -> str:
    """Whose chunks were put off into a segment."""
    return later.stem.partition(".")[2]


def _later_bytes(folder: Path) -> Counter[str]:
    """Bytes that were put off, by tenant."""
    found: Counter[str] = Counter()
    for path in later_segments(folder):
        with contextlib.suppress(OSError):  # it was stored just now
            found[tenant_of(path)] += path.stat().st_size
    return found


def secret_of(folder: Path) -> bytes:
    """The secret of the logs in DIR/wal, made if there is none. Raises OSError."""
    path = folder / "secret"
    draft = folder / f".secret-{uuid.uuid4().hex}"
    if not path.exists():
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        fd = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, secrets.token_bytes(SECRET_BYTES))
            os.fsync(fd)
        finally:
            os.close(fd)
        with contextlib.suppress(FileExistsError):  # another server was first
            os.link(draft, path)
        draft.unlink()
        sync_folder(folder)
    found = path.read_bytes()
    if len(found) != SECRET_BYTES:
        raise OSError(errno.EINVAL, "the secret of the log is damaged", str(path))
    return found


def sync_folder(folder: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sealed_segments(folder: Path) -> list[Path]:
    """The segments of every server in DIR/wal that may be flushed, oldest first.

    Segments that a dead server left open are sealed first.
    """
    found = []
    for server in sorted(folder.glob("[!.]*")):
        try:
            fd = os.open(server / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in server.glob(f"*{OPEN}"):
                path.rename(path.with_suffix(SEALED))
            left = sorted(server.glob(f"*{SEALED}"))
            if not left:
                (server / "lock").unlink()
                server.rmdir()
        except OSError:  # alive
            left = sorted(server.glob(f"*{SEALED}"))
        finally:
            os.close(fd)
        found += left
    return found
