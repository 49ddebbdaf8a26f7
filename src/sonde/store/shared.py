# SPDX-License-Identifier: Apache-2.0
"""What all servers of a bucket have published, for the questions of one of them.

Each server writes under its own name and reads what the others list (published.py), some seconds
later. Files are copied into the directory when a question needs them.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from sonde.errors import CaptureError, CaptureTooLarge
from sonde.query.stored_session import QueryTimedOutError
from sonde.store.bucket import Bucket
from sonde.store.catalog import StoredFile
from sonde.store.downloads import Downloads, at_hand, evict, fetched_files
from sonde.store.published import Published, servers_of
from sonde.store.storage import BucketSettings

LOG = logging.getLogger("sonde.store")

LOOK_S = 5.0
"""Between two looks: readings of the other servers' catalogs."""
_AT_ONCE = 8
"""Downloads of one question at a time; those of all questions: downloads.AT_ONCE."""


class _Listed:
    """What one server has published, by tenant and table, sorted by the last time in each file."""

    def __init__(self, view: Published) -> None:
        self.last = view.last
        self.files = view.files
        """By path."""
        grouped: dict[tuple[str, str], list[StoredFile]] = {}
        for one in view.files.values():
            grouped.setdefault((one.tenant, one.name), []).append(one)
        self._sorted: dict[tuple[str, str], tuple[list[int], list[StoredFile]]] = {}
        for key, files in grouped.items():
            files.sort(key=lambda one: (one.max_ns, one.path))
            self._sorted[key] = [one.max_ns for one in files], files

    def of(self, tenant: str, name: str, start_ns: int, end_ns: int) -> list[StoredFile]:
        """Files of a table with a time in [start_ns, end_ns)."""
        ends_ns, files = self._sorted.get((tenant, name), ((), ()))
        return [one for one in files[bisect_left(ends_ns, start_ns) :] if one.min_ns < end_ns]


class SharedStore:
    """The other servers of a bucket, and the files of all. Thread-safe."""

    def __init__(self, folder: Path, settings: BucketSettings) -> None:
        """Starts a thread that looks every `LOOK_S` until `close`. Raises UsageError."""
        self._folder, self._settings = folder, settings
        self._bucket = Bucket(settings.uri)
        self.downloads = Downloads(folder, self._bucket, settings.cache_bytes, self._make_room)
        self._others: Mapping[str, _Listed] = {}
        """By server; exchanged as a whole, never changed."""
        self._looked_at = -1.0
        self.failures = 0
        """Catalogs of other servers that could not be read, counted at each look."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, name="sonde-bucket", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the looks."""
        self._ended.set()

    def _make_room(self, needed_bytes: int) -> int:
        """Remove fetched files for a question's file; returns how many. Files that this server has
        written stay: only the flusher knows which of them the bucket has."""
        files = fetched_files(self._folder)
        return evict(self._folder, files, self._settings.cache_bytes, needed_bytes)

    @property
    def age_s(self) -> float:
        """Seconds since the last look in which every other server's catalog could be read; -1:
        there was none yet."""
        return time.monotonic() - self._looked_at if self._looked_at >= 0 else -1.0

    def _keep_looking(self) -> None:
        views: dict[str, Published] = {}
        while not self._ended.is_set():
            try:
                failed = self._look(views)
            except Exception as error:  # content of the bucket must not end this thread
                failed = [error]
            if not failed:
                self._looked_at = time.monotonic()
            for why in failed:
                self.failures += 1
                LOG.warning("what other servers have is not known: %s", why)
            self._ended.wait(LOOK_S)

    def _look(self, views: dict[str, Published]) -> list[Exception]:
        """Read what other servers have published since; returns the errors of those whose catalog
        cannot be read. `views`: by server, kept between looks."""
        there = set(servers_of(self._bucket)) - {self._settings.server}
        for name in set(views) - there:
            del views[name]
        failed: list[Exception] = []
        for name in sorted(there):
            try:
                views.setdefault(name, Published(self._bucket, name)).refresh()
            except Exception as error:  # the others' are read all the same
                failed.append(error)
        # Only what has changed is sorted again.
        self._others = {
            name: known
            if (known := self._others.get(name)) is not None and known.last == view.last
            else _Listed(view)
            for name, view in views.items()
        }
        return failed

    def files(self, tenant: str, name: str, start_ns: int, end_ns: int) -> list[StoredFile]:
        """Files of the other servers, as `Catalog.files`; a path that two list is one file."""
        found: dict[str, StoredFile] = {}
        for listed in self._others.values():
            for one in listed.of(tenant, name, start_ns, end_ns):
                found.setdefault(one.path, one)  # from the server that `_server_of` returns
        return list(found.values())

    def paths(self, files: Sequence[StoredFile], ends_s: float) -> list[Path]:
        """The paths of files in the directory; those that are not there are fetched before `ends_s`
        (monotonic).

        Raises CaptureTooLarge where the cache cannot hold them, QueryTimedOutError (what was
        fetched stays), CaptureError.
        """
        found = {one.path: at_hand(self._folder, one) for one in files}
        missing = [one for one in files if found[one.path] is None]
        size = sum(one.size_bytes for one in missing)
        if size > self._settings.cache_bytes:
            raise CaptureTooLarge(
                f"this needs {size / 1e9:.1f} GB from the bucket, more than the server's cache",
                "choose a shorter time, or give the server more with --cache-gb",
            )
        if missing:
            found |= self._fetch(missing, ends_s)
        return [path for one in files if (path := found[one.path])]

    def _server_of(self, path: str) -> str:
        """The name of the server that has written a file."""
        listing = (name for name, listed in self._others.items() if path in listed.files)
        return next(listing, self._settings.server)

    def _fetch(self, missing: list[StoredFile], ends_s: float) -> dict[str, Path]:
        pool = ThreadPoolExecutor(_AT_ONCE, "sonde-fetch")
        try:
            begun = {
                one.path: pool.submit(self.downloads.file, self._server_of(one.path), one, ends_s)
                for one in missing
            }
            _, late = wait(begun.values(), max(0.0, ends_s - time.monotonic()))
            if not late:
                return {path: one.result() for path, one in begun.items()}
        except TimeoutError:
            late = {one for one in begun.values() if one.exception()}
        except OSError as error:
            raise CaptureError(
                f"the bucket cannot be read: {str(error)[:200]}", "try again"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        raise QueryTimedOutError(
            f"{len(late)} of {len(missing)} files are still to come from the bucket",
            "ask again, or choose a shorter time",
        )


class FetchedPaths(Mapping[str, Sequence[Path]]):
    """Paths of files by table, which are fetched when a question reads the table."""

    def __init__(
        self, shared: SharedStore, files: Mapping[str, list[StoredFile]], seconds: float
    ) -> None:
        """`seconds`: for all downloads of the question."""
        self._shared, self._files = shared, files
        self._ends_s = time.monotonic() + seconds

    def __getitem__(self, name: str) -> Sequence[Path]:
        return self._shared.paths(self._files[name], self._ends_s)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
