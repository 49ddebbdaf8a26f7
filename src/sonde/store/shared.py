# SPDX-License-Identifier: Apache-2.0
"""What all servers of a bucket have published, for the questions of one of them.

Each server writes under its own name and reads what the others list (published.py), some seconds
later. Files are copied into the directory when a question needs them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from sonde.errors import CaptureError, CaptureTooLarge
from sonde.query.stored import QueryTimedOutError
from sonde.store.bucket import Bucket
from sonde.store.catalog import StoredFile
from sonde.store.copies import BucketSettings, at_hand, fetched
from sonde.store.published import Published, servers_of

LOG = logging.getLogger("sonde.store")

LOOK_S = 5.0
"""Between two looks at what others have published."""
_AT_ONCE = 8


class SharedStore:
    """The other servers of a bucket, and the files of all. Thread-safe."""

    def __init__(self, folder: Path, settings: BucketSettings) -> None:
        """Raises UsageError. Looks, in another thread, until `close`."""
        self._folder, self._settings = folder, settings
        self._bucket = Bucket(settings.uri)
        self._mutex = threading.Lock()
        self._others: dict[str, dict[str, StoredFile]] = {}
        self._server_of: dict[str, str] = {}
        self._looked_at = -1.0
        self.failures = 0
        """Looks that have failed."""
        self.fetched_files = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, name="sonde-bucket", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._ended.set()

    @property
    def age_s(self) -> float:
        """Since when the others are known as they are, -1: they are not."""
        return time.monotonic() - self._looked_at if self._looked_at >= 0 else -1.0

    def _keep_looking(self) -> None:
        views: dict[str, Published] = {}
        while not self._ended.is_set():
            try:
                failed = self._look(views)
            except Exception as error:  # what others have written must not end the looks
                failed = [error]
            if not failed:
                self._looked_at = time.monotonic()
            for why in failed:
                self.failures += 1
                LOG.warning("what other servers have is not known: %s", why)
            self._ended.wait(LOOK_S)

    def _look(self, views: dict[str, Published]) -> list[Exception]:
        """Take over what is new; returns why not, where one server's catalog cannot be read."""
        there = set(servers_of(self._bucket)) - {self._settings.server}
        for name in set(views) - there:
            del views[name]
        failed: list[Exception] = []
        for name in sorted(there):
            try:
                views.setdefault(name, Published(self._bucket, name)).refresh()
            except Exception as error:  # one server's catalog costs no other one
                failed.append(error)
        others = {name: dict(view.files) for name, view in views.items()}
        server_of = {path: name for name, files in others.items() for path in files}
        with self._mutex:
            self._others, self._server_of = others, server_of
        return failed

    def files(self, tenant: str, name: str, start_ns: int, end_ns: int) -> list[StoredFile]:
        """Files of the other servers, as `Catalog.files`."""
        with self._mutex:
            others = self._others
        return [
            one
            for files in others.values()
            for one in files.values()
            if one.tenant == tenant
            and one.name == name
            and one.max_ns >= start_ns
            and one.min_ns < end_ns
        ]

    def paths(self, files: Sequence[StoredFile], ends_s: float) -> list[Path]:
        """Files in the directory, fetched where they are not there, until a time (monotonic).

        Raises CaptureTooLarge where the cache cannot hold them, QueryTimedOutError (what was
        fetched stays), CaptureError.
        """
        places = {one.path: at_hand(self._folder, one.path) for one in files}
        missing = [one for one in files if places[one.path] is None]
        size = sum(one.size_bytes for one in missing)
        if size > self._settings.cache_bytes:
            raise CaptureTooLarge(
                f"this needs {size / 1e9:.1f} GB from the bucket, more than the server's cache",
                "choose a shorter time, or give the server more with --cache-gb",
            )
        if missing:
            places |= self._fetch(missing, ends_s)
        return [place for one in files if (place := places[one.path])]

    def _fetch(self, missing: list[StoredFile], ends_s: float) -> dict[str, Path]:
        with self._mutex:
            servers = self._server_of
        pool = ThreadPoolExecutor(_AT_ONCE, "sonde-fetch")
        try:
            begun = {
                one.path: pool.submit(
                    fetched,
                    self._folder,
                    self._bucket,
                    servers.get(one.path, self._settings.server),
                    one.path,
                )
                for one in missing
            }
            _, late = wait(begun.values(), max(0.0, ends_s - time.monotonic()))
            if late:
                raise QueryTimedOutError(
                    f"{len(late)} of {len(missing)} files are still to come from the bucket",
                    "ask again, or choose a shorter time",
                )
            found = {path: one.result() for path, one in begun.items()}
        except QueryTimedOutError:
            raise
        except OSError as error:
            raise CaptureError(
                f"the bucket cannot be read: {str(error)[:200]}", "try again"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        self.fetched_files += len(found)
        return found


class FetchedPaths(Mapping[str, Sequence[Path]]):
    """Files by table, fetched when a question names the table."""

    def __init__(
        self, shared: SharedStore, files: Mapping[str, list[StoredFile]], seconds: float
    ) -> None:
        """`seconds`: for all of it."""
        self._shared, self._files = shared, files
        self._ends_s = time.monotonic() + seconds

    def __getitem__(self, name: str) -> Sequence[Path]:
        return self._shared.paths(self._files[name], self._ends_s)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
