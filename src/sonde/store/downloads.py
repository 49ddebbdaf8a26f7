# SPDX-License-Identifier: Apache-2.0
"""Downloads from a bucket into a server's directory, with limits for all questions together.

Writers of the bucket choose what lies there and what its catalogs state, and any question may need
files. So a file that has not the size that its catalog states is refused, few are downloaded at a
time, and some of the disk stays free for the log of chunks.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sonde.store.bucket import PART, Bucket, DamagedObjectError
from sonde.store.catalog import StoredFile
from sonde.store.published import folder_of

LOG = logging.getLogger("sonde.store")

CACHE = "cache"
"""Folder for fetched files of all servers; its layout is that of `data`."""
AT_ONCE = 16
"""Downloads at a time, of all questions."""
KEPT_FREE_BYTES = 1 << 30
KEPT_FREE_SHARE = 0.05
"""Downloads leave free the lesser of this many bytes and this share of the disk."""
USED_S = 120.0
"""Files that were used within this time stay in the cache, however full it is."""
LOGGED_AGAIN_S = 60.0
"""Refusals of one reason are logged once in this time."""
DRAFT_S = 600.0
"""A draft (an unfinished file) that was not written to for so long has no writer any more: each
block of a download comes within the time limit of a request."""


def possible_paths(folder: Path, path: str) -> tuple[Path, Path]:
    """Where a file may lie: (as this server wrote it, as it was fetched)."""
    return folder / path, folder / CACHE / path.partition("/")[2]


def at_hand(folder: Path, one: StoredFile) -> Path | None:
    """The path of a file that is in the directory, marked as used now; None where it is not there.
    Raises OSError."""
    written, fetched = possible_paths(folder, one.path)
    with suppress(FileNotFoundError):
        os.utime(written)
        return written
    with suppress(FileNotFoundError):
        # A fetched file is not synced: after a loss of power it may be shorter.
        if fetched.stat().st_size == one.size_bytes:
            os.utime(fetched)
            return fetched
    return None


class Downloads:
    """The downloads of one process into one directory. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        bucket: Bucket,
        most_bytes: int,
        make_room: Callable[[int], int] = lambda _: 0,
    ) -> None:
        """`most_bytes`: of all files that are downloaded at a time; a larger one comes alone.
        `make_room`: removes files so that the disk has room for a number of bytes; returns how many
        were removed."""
        self._folder, self._bucket, self._most_bytes = folder, bucket, most_bytes
        self._make_room = make_room
        self._changed = threading.Condition()
        self._running = 0
        self._running_bytes = 0
        self.fetched_files = 0
        """How many were downloaded; the function `fetched_files` lists those that are here now."""
        self.refused: Counter[str] = Counter()
        """Refused downloads by reason: disk (no room), size (not as stated), time (no turn)."""
        self._logged_s: dict[str, float] = {}

    def file(self, server: str, one: StoredFile, ends_s: float = math.inf) -> Path:
        """The path of a file in the directory; it is downloaded where it is not there. A turn is
        waited for until `ends_s` (monotonic); the download itself may take longer. Where the disk
        lacks room, `make_room` is tried once. Two questions for one file may download it twice.

        Raises FileNotFoundError, BucketError, TimeoutError, OSError where the disk has no room.
        """
        found = at_hand(self._folder, one)
        if found is not None:
            return found
        try:
            return self._fetched(server, one, ends_s)
        except OSError as error:
            if error.errno != errno.ENOSPC or not self._make_room(one.size_bytes):
                raise
        return self._fetched(server, one, ends_s)

    def _fetched(self, server: str, one: StoredFile, ends_s: float) -> Path:
        found = possible_paths(self._folder, one.path)[1]
        with self._turn(one, ends_s):
            found.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                self._bucket.fetch(f"{folder_of(server)}/{one.path}", found, one.size_bytes)
            except DamagedObjectError as error:
                self._refuse("size", str(error))
                raise
        with self._changed:
            self.fetched_files += 1
        return found

    @contextmanager
    def _turn(self, one: StoredFile, ends_s: float) -> Iterator[None]:
        """Within this context the file counts as being downloaded."""
        size = one.size_bytes
        try:
            self._begin(one, ends_s)
        except TimeoutError:
            self._refuse("time", f"{one.path} did not get its turn")
            raise
        except OSError as error:
            if error.errno == errno.ENOSPC:
                self._refuse("disk", str(error.strerror))
            raise
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._running_bytes -= size
                self._changed.notify_all()

    def _begin(self, one: StoredFile, ends_s: float) -> None:
        """Wait until the limits allow one more download, and count it. Raises TimeoutError,
        OSError."""
        size = one.size_bytes
        with self._changed:
            while self._running and (
                self._running >= AT_ONCE or self._running_bytes + size > self._most_bytes
            ):
                left_s = ends_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError("other downloads took the time")
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
            # What running downloads have written already counts twice: rather too little than too
            # much.
            free = self._free_bytes() - self._running_bytes
            if size > free:
                text = (
                    f"{size:,} bytes from the bucket do not fit the disk: {max(0, free):,} are free"
                )
                raise OSError(errno.ENOSPC, text)
            self._running += 1
            self._running_bytes += size

    def _free_bytes(self) -> int:
        return free_bytes(self._folder)

    def _refuse(self, why: str, text: str) -> None:
        now_s = time.monotonic()
        with self._changed:
            self.refused[why] += 1
            count = self.refused[why]
            is_due = now_s >= self._logged_s.get(why, -math.inf) + LOGGED_AGAIN_S
            if is_due:
                self._logged_s[why] = now_s
        if is_due:  # outside of the lock: a slow log must not delay downloads
            LOG.warning("a download is refused (%s, %d so far): %s", why, count, text)


def free_bytes(folder: Path) -> int:
    """Bytes that downloads may still use of the disk; negative where less is free than must stay.
    Raises OSError."""
    found = os.statvfs(folder)
    kept = min(KEPT_FREE_BYTES, int(KEPT_FREE_SHARE * found.f_blocks * found.f_frsize))
    return found.f_bavail * found.f_frsize - kept


def fetched_files(folder: Path) -> list[Path]:
    """The files in the cache."""
    return list((folder / CACHE).glob("*/*/*/*/*.parquet"))


def evict(folder: Path, files: Iterable[Path], cache_bytes: int, needed_bytes: int = 0) -> int:
    """Remove files, the least recently used first, until all together have at most `cache_bytes`
    and the disk has `needed_bytes` beyond what must stay free. Where that cannot make room for
    `needed_bytes`, nothing is removed: catalogs may state any size. Returns how many.

    `files`: in the directory, all of which the bucket has, too.
    """
    found = []
    for path in files:
        with suppress(FileNotFoundError):
            about = path.stat()
            found.append((about.st_mtime, about.st_size, path))
    found.sort()
    size = sum(one[1] for one in found)
    lacking = needed_bytes - free_bytes(folder)
    recent_s = time.time() - USED_S
    if needed_bytes and lacking > sum(one[1] for one in found if one[0] <= recent_s):
        return 0
    gone = 0
    for used_s, size_bytes, path in found:
        is_enough = size <= cache_bytes and lacking <= 0
        if is_enough or used_s > recent_s:
            break
        path.unlink(missing_ok=True)
        size -= size_bytes
        lacking -= size_bytes
        gone += 1
    return gone


def remove_drafts(folder: Path) -> int:
    """Remove drafts that killed downloads have left in the cache; returns how many."""
    gone = 0
    oldest_s = time.time() - DRAFT_S
    for path in (folder / CACHE).glob(f"*/*/*/*/.*{PART}"):
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < oldest_s:
                path.unlink()
                gone += 1
    if gone:
        LOG.warning("%d drafts of files from the bucket had no writer any more", gone)
    return gone
