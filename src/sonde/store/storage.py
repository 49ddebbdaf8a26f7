# SPDX-License-Identifier: Apache-2.0
"""Where the files of a store are: in its directory alone, or in a bucket, too.

With a bucket the directory is a cache of it, of bounded size, and the log of chunks stays until
the files made from it are published there:

1. a batch's files are written and synced in the directory;
2. they are written to the bucket (`put`); where that fails, they are removed again;
3. they are added to the directory's catalog, in one transaction with the digests of their chunks;
4. the bucket's catalog lists them (`publish`), and only then is the segment of the log removed.

A kill between two of these leaves a batch in the log that is flushed again (1, 2), or files that
are published at the next start (3); never a chunk in both.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from sonde.errors import UsageError
from sonde.store.bucket import Bucket, BucketError, DamagedObjectError
from sonde.store.catalog import Catalog, StoredFile
from sonde.store.downloads import Downloads, evict, fetched_files, possible_paths, remove_drafts
from sonde.store.published import Published, Publisher, folder_of, servers_of
from sonde.store.wal import later_segments, sealed_segments, sync_folder

LOG = logging.getLogger("sonde.store")

SERVER_NAME = "server-name"
"""File with the name under which the directory is in its bucket."""
_AT_ONCE = 4
"""Uploads at a time."""
_REMEMBERED_S = 4 * 86_400
"""At least as long as digests stay in the catalog (flush.REMEMBERED_NS)."""
_CLOCKS_S = 600.0
"""By how much the clocks of servers may differ."""
_HOURS_S = 3 * 3_600
"""A chunk is stored under an hour that began at most this long before it came (flush.CLOSE_NS)."""
_MAX_ELSEWHERE = 4 << 20
"""Digests of chunks of other servers that are kept in memory, until the file that exceeds it."""
_ABSENT_S = 120.0
"""How long objects stay after the catalog in the bucket no longer lists them, for readers."""


class DirectoryStorage:
    """Files of a store without a bucket: all of them are in its directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def join(self) -> None:
        """Make directory and bucket agree, before anything else. Raises BucketError."""

    def is_elsewhere(self, _digest: bytes) -> bool:
        """Whether another server has stored a chunk of this one's log."""
        return False

    def put(self, files: Sequence[StoredFile]) -> None:
        """Make files durable elsewhere, before they count. Raises BucketError."""

    def publish(self) -> None:
        """List elsewhere the files that count. Raises BucketError."""

    def local(self, one: StoredFile) -> Path:
        """The path in the directory of a file of the catalog. Raises BucketError, OSError."""
        return self._folder / one.path

    def deletable(self, paths: list[str]) -> list[str]:
        """Those of the removed files that no question reads any more."""
        return paths

    def delete(self, path: str) -> None:
        """Remove a file that no longer counts. Raises BucketError."""
        (self._folder / path).unlink(missing_ok=True)

    def shrink_cache(self) -> int:
        """Remove files that are elsewhere, too, beyond the size of the cache; returns how many."""
        return 0


@dataclass(frozen=True, slots=True)
class BucketSettings:
    """Where and how a server uses a bucket."""

    uri: str
    server: str
    """Its name; nobody else may write under it."""
    cache_bytes: int
    """Most bytes of files in the directory, without the log."""


def keep_server_name(folder: Path, server: str) -> None:
    """Write into the directory under which name it is in its bucket, or check that it is this one.

    Under another name everything in the directory would be published a second time. Raises
    UsageError for another name, OSError.
    """
    path = folder / SERVER_NAME
    if not path.exists():
        draft = folder / f".{uuid.uuid4().hex}{SERVER_NAME}"
        try:
            with draft.open("x") as to:
                to.write(f"{server}\n")
                to.flush()
                os.fsync(to.fileno())
            with suppress(FileExistsError):  # another server of the directory was first
                path.hardlink_to(draft)
            sync_folder(folder)
        finally:
            draft.unlink(missing_ok=True)
    kept = path.read_text(errors="replace").strip()[:64]
    if kept != server:
        raise UsageError(
            f"this store is {kept!r} in its bucket, not {server!r}", f"give --server-name {kept}"
        )


class BucketStorage(DirectoryStorage):
    """Files of a store with a bucket. Only for the holder of `flush.lock`."""

    def __init__(self, folder: Path, catalog: Catalog, settings: BucketSettings) -> None:
        """Raises UsageError."""
        super().__init__(folder)
        self._catalog, self._settings = catalog, settings
        self._bucket = Bucket(settings.uri)
        self._downloads = Downloads(folder, self._bucket, settings.cache_bytes, self._evict)
        self._publisher = Publisher(self._bucket, settings.server)
        self._refused = 0
        """Refused downloads that are counted in the catalog already."""
        self._is_joined = False
        self._elsewhere: set[bytes] = set()
        """Digests of chunks that other servers have stored (`_stored_by_others`)."""

    def join(self) -> None:
        """Make directory and bucket agree, at the start and after a failed `put`: files of the
        bucket are added to the catalog, files that it lacks are uploaded, entries of files that
        neither has are dropped, and objects that do not count are removed. Raises BucketError,
        OSError."""
        if self._is_joined:
            return
        published = dict(self._publisher.load())
        folder = folder_of(self._settings.server)
        self._catalog.count(drafts_removed=self._bucket.remove_drafts(folder))
        there = {
            one.name.removeprefix(f"{folder}/") for one in self._bucket.listed(f"{folder}/data")
        }
        own = {one.path: one for one in self._catalog.files()}
        removed = set(self._catalog.removed(1 << 62))
        new = [one for path, one in published.items() if path not in own and path not in removed]
        adopted = [one for one in new if one.path in there]
        missing = [one for path, one in own.items() if path not in published or path not in there]
        gone = {one.path for one in missing if not (self._folder / one.path).exists()}
        self._catalog.adopt(
            adopted,
            self._chunks_of(adopted),
            gone,
            files_adopted=len(adopted),
            files_lost=len(gone) + len(new) - len(adopted),
        )
        self.put([one for one in missing if one.path not in gone])
        self.publish()
        # Objects that a killed server has left: no catalog lists them.
        for path in there - own.keys() - removed - {one.path for one in adopted}:
            self._bucket.delete(f"{folder}/{path}")
        self._elsewhere = self._stored_by_others()
        self._is_joined = True

    def _stored_by_others(self) -> set[bytes]:
        """Digests of the chunks that other servers have stored since the oldest segment of this
        server's log was written: while this server was down, agents may have sent the same chunks
        to others."""
        found: set[bytes] = set()
        wal = self._folder / "wal"
        segments = sealed_segments(wal) + later_segments(wal)
        if not segments:
            return found
        since_s = min(path.stat().st_mtime for path in segments) - _CLOCKS_S
        at = time.gmtime(since_s - _HOURS_S)
        first_hour = time.strftime("%Y-%m-%d", at), at.tm_hour
        received = [("received_ns", ">=", int(since_s * 1e9))]
        for name in servers_of(self._bucket):
            if name == self._settings.server:
                continue
            try:
                view = Published(self._bucket, name)
                view.refresh()
            except Exception as error:  # another server's catalog must not stop this server
                self._not_known(name, error)
                continue
            for one in view.files.values():
                if one.name != "chunk" or (one.day, one.hour) < first_hour:
                    continue
                try:
                    path = self._downloads.file(name, one)
                    rows = pq.read_table(path, columns=["digest"], filters=received)
                    found.update(rows.column("digest").to_pylist())
                except Exception as error:
                    self._not_known(name, error)
            if len(found) > _MAX_ELSEWHERE:
                LOG.warning("others have stored more chunks than are compared")
                break
        return found

    def _not_known(self, server: str, error: Exception) -> None:
        """Count and log that what a server has stored cannot be read."""
        self._catalog.count(bucket_failures=1)
        LOG.warning("what %s has stored is not known: %s", server, error)

    def is_elsewhere(self, digest: bytes) -> bool:
        """Whether another server had stored a chunk of the log when this one started."""
        return digest in self._elsewhere

    def _chunks_of(self, files: list[StoredFile]) -> list[tuple[bytes, int]]:
        """(digest, when it came) of the chunks in files of the table `chunk`, of the days whose
        digests the catalog keeps. Older ones are found in the files (stored_digests.py)."""
        first_day = time.strftime("%Y-%m-%d", time.gmtime(time.time() - _REMEMBERED_S))
        found: list[tuple[bytes, int]] = []
        for one in files:
            if one.name == "chunk" and one.day >= first_day:
                try:
                    path = self.local(one)
                except DamagedObjectError as error:
                    self._not_known(self._settings.server, error)
                    continue
                try:
                    rows = pq.read_table(path, columns=["digest", "received_ns"])
                    columns = [rows.column(name).to_pylist() for name in ("digest", "received_ns")]
                except Exception as error:  # a damaged file stops no start
                    self._not_known(self._settings.server, error)
                    continue
                found += zip(*columns, strict=True)
        return found

    def put(self, files: Sequence[StoredFile]) -> None:
        """Upload files. Raises BucketError; the caller must not let any of them count then."""
        try:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(self._put_one, files))
        except BucketError:
            self._catalog.count(bucket_failures=1)
            self._is_joined = False  # `join` removes those that were written
            raise
        if files:
            size = sum(one.size_bytes for one in files)
            self._catalog.count(bucket_objects_written=len(files), bucket_bytes_written=size)

    def _put_one(self, one: StoredFile) -> None:
        self._bucket.put_file(self._folder / one.path, self._name(one.path))

    def _name(self, path: str) -> str:
        return f"{folder_of(self._settings.server)}/{path}"

    def publish(self) -> None:
        """List the files that count in the bucket. Raises BucketError."""
        try:
            self._publisher.publish(self._catalog.files())
        except BucketError:
            self._catalog.count(bucket_failures=1)
            raise

    def local(self, one: StoredFile) -> Path:
        """The path of a file in the directory, fetched where it is not there; where the disk lacks
        room, other files are removed. Raises BucketError, OSError."""
        return self._downloads.file(self._settings.server, one)

    def deletable(self, paths: list[str]) -> list[str]:
        """Those that the bucket's catalog has not listed for `_ABSENT_S`."""
        return [path for path in paths if self._publisher.absent_s(path) > _ABSENT_S]

    def delete(self, path: str) -> None:
        """Remove a file here and there. Raises BucketError."""
        self._bucket.delete(self._name(path))
        for one in possible_paths(self._folder, path):
            one.unlink(missing_ok=True)
        self._publisher.forget(path)

    def shrink_cache(self) -> int:
        """Remove the least recently used files from the directory, beyond the size of the cache and
        until enough of the disk is free; returns how many. The bucket has all of them."""
        refused = self._downloads.refused.total()
        self._catalog.count(
            drafts_removed=remove_drafts(self._folder),
            downloads_refused=refused - self._refused,
        )
        self._refused = refused
        return self._evict(0)

    def _evict(self, needed_bytes: int) -> int:
        """As `shrink_cache`, and until `needed_bytes` more are free."""
        published = list(self._publisher.state.files)
        every = fetched_files(self._folder)
        every += [path for one in published if (path := self._folder / one).exists()]
        return evict(self._folder, every, self._settings.cache_bytes, needed_bytes)
