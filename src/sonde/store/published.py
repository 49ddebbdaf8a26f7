# SPDX-License-Identifier: Apache-2.0
"""Which files of a server count, as its bucket has it: generations of its catalog.

```
PREFIX/server=NAME/data/TENANT/TABLE/day=…/hour=…/ID.parquet       as in the server's own directory
PREFIX/server=NAME/catalog/000000000042-WRITER-all.json.gz         every file
PREFIX/server=NAME/catalog/000000000043-WRITER-changes.json.gz     files added, files gone
```

One server writes under a name, so no lock is needed, and every object is written once. A reader
takes the newest `all` and what follows it. Writers of the bucket are trusted with its content, but
each path is checked: it names a file of that tenant, table, day and hour, and no other.
"""

from __future__ import annotations

import gzip
import io
import re
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date

import msgspec

from sonde.store.bucket import Bucket, BucketError
from sonde.store.catalog import StoredFile

_SERVER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PATH = re.compile(
    r"data/[A-Za-z0-9][A-Za-z0-9._-]{0,63}/[a-z_]{1,40}/day=\d{4,5}-\d\d-\d\d/hour=\d\d"
    r"/[0-9a-f]{32}\.parquet",
    re.ASCII,
)
"""Of a file, relative to the server's folder."""
_OBJECT = re.compile(r"(\d{12})-([0-9a-f]{32})-(all|changes)\.json\.gz", re.ASCII)
_MAX_BYTES = 512 << 20
"""Of a generation, decompressed: some two million files."""
_MAX_SIZE = 1 << 40
"""Of a file: most bytes, and most rows."""
ALL_EVERY = 100
"""One generation of this many lists every file, the others changes."""


_DAMAGE = (OSError, EOFError, ValueError, RecursionError, zlib.error, msgspec.MsgspecError)
"""Raised when an object is decoded that is no generation."""


class NameTakenError(BucketError):
    """Another server publishes under this one's name."""


class _Generation(msgspec.Struct, forbid_unknown_fields=False):
    """The content of an object: files that count (all, or those added), paths that do not any
    more."""

    version: int
    added: list[StoredFile]
    gone: list[str] = []


@dataclass(frozen=True, slots=True, order=True)
class _Object:
    """The name of a generation's object. `kind`: 'all' or 'changes'."""

    number: int
    writer: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.number:012d}-{self.writer}-{self.kind}.json.gz"


def is_server_name(name: str) -> bool:
    """Whether a server may have this name."""
    return bool(_SERVER.fullmatch(name))


def folder_of(server: str) -> str:
    """Where a server's objects are."""
    return f"server={server}"


def servers_of(bucket: Bucket) -> list[str]:
    """The names of the servers that have written there. Raises BucketError."""
    names = [one.partition("=")[2] for one in bucket.folders() if one.startswith("server=")]
    return [one for one in names if is_server_name(one)]


@dataclass(slots=True)
class Published:
    """The catalog of one server as its bucket has it. Not thread-safe."""

    bucket: Bucket
    server: str
    files: dict[str, StoredFile] = field(default_factory=dict)
    """By path, those that count."""
    last: _Object | None = None
    """The newest generation that is in `files`."""

    def refresh(self) -> list[_Object]:
        """Apply generations that are new; returns all that the bucket has, oldest first.

        Raises BucketError; `files` and `last` stay as they were then.
        """
        files, last = self.files, self.last
        for attempt in (1, 2):
            try:
                found = self._generations()
                for one, read in self._new(found, last):
                    if files is self.files:  # others may read it: it is never changed
                        files = dict(files)
                    files = self._with(files, one, read)
                    last = one
            except FileNotFoundError as error:  # an older one was removed meanwhile
                files, last = {}, None
                if attempt == 2:
                    raise BucketError(f"the catalog of {self.server} is incomplete") from error
            else:
                self.files, self.last = files, last
                return found
        raise AssertionError

    def _generations(self) -> list[_Object]:
        found = []
        for listed in self.bucket.listed(f"{folder_of(self.server)}/catalog"):
            match = _OBJECT.fullmatch(listed.name.rpartition("/")[2])
            if match:
                found.append(_Object(int(match[1]), match[2], match[3]))
        return sorted(found)

    def _new(
        self, found: list[_Object], last: _Object | None
    ) -> Iterator[tuple[_Object, _Generation]]:
        """The generations after `last`; where some of those are missing, from the newest one on
        that lists every file. Raises FileNotFoundError where none does."""
        folder = f"{folder_of(self.server)}/catalog"
        new = [one for one in found if last is None or one.number > last.number]
        if new and (last is None or new[0].number > last.number + 1):
            starts = [at for at, one in enumerate(new) if one.kind == "all"]
            if not starts:
                raise FileNotFoundError(folder)
            new = new[starts[-1] :]
        for one in new:
            yield one, _read(self.bucket.get(f"{folder}/{one.name}"), one.name)

    def _with(
        self, files: dict[str, StoredFile], one: _Object, read: _Generation
    ) -> dict[str, StoredFile]:
        """The files after a generation. Raises BucketError where an entry is invalid."""
        if one.kind == "all":
            files = {}
        for path in read.gone:
            files.pop(path, None)
        for stored in read.added:
            if not _is_file(stored):
                raise BucketError(f"the catalog of {self.server} names a file wrongly")
            files[stored.path] = stored
        return files


def _is_file(one: StoredFile) -> bool:
    """Whether the path of an entry is one of its tenant, table, day and hour, and its numbers are
    possible: SQLite takes none beyond 64 bits."""
    times = one.min_ns, one.max_ns
    sizes = one.row_count, one.size_bytes
    if not (
        0 <= one.hour < 24
        and all(-(1 << 63) <= time_ns < 1 << 63 for time_ns in times)
        and all(0 <= size < _MAX_SIZE for size in sizes)
        and abs(one.level) < 1 << 16
        and _is_day(one.day)
    ):
        return False
    folder = f"data/{one.tenant}/{one.name}/day={one.day}/hour={one.hour:02d}/"
    return bool(_PATH.fullmatch(one.path)) and one.path.startswith(folder)


def _is_day(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def _read(content: bytes, name: str) -> _Generation:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            text = file.read(_MAX_BYTES)
        found = msgspec.json.decode(text, type=_Generation)
    except _DAMAGE as error:
        raise BucketError(f"{name} in the bucket cannot be read") from error
    if found.version != 1:
        raise BucketError(f"{name} in the bucket is of another version of Sonde")
    return found


class Publisher:
    """Writes the catalog of one server. Only one may exist for a name at a time."""

    def __init__(self, bucket: Bucket, server: str) -> None:
        self.state = Published(bucket, server)
        self._writer = uuid.uuid4().hex
        self._numbers_since_all = ALL_EVERY
        """Generations from the last one that lists every file; the first of a process does."""
        self._absent_since: dict[str, float] = {}
        """By path: when `absent_s` was first asked (monotonic)."""
        self._is_displaced = False
        """Whether another server has published under this name."""
        self._known: _Object | None = None
        """The newest generation when this object last read or wrote."""

    def load(self) -> dict[str, StoredFile]:
        """The files that are published, by path. Raises NameTakenError, BucketError."""
        self.state.refresh()
        self._check_name()
        self._known = self.state.last
        return self.state.files

    def publish(self, files: Iterable[StoredFile]) -> int:
        """Publish which files count (those that questions read); returns how many were added or
        removed.

        Raises NameTakenError, BucketError. After a BucketError the generation may be there or not:
        the next call reads the bucket and goes on from what it finds.
        """
        counting = {one.path: one for one in files}
        state = self.state
        if state.last is not None and state.files.keys() == counting.keys():
            return 0
        present = state.refresh()
        self._check_name()
        added = [one for path, one in counting.items() if path not in state.files]
        gone = [path for path in state.files if path not in counting]
        is_all = self._numbers_since_all >= ALL_EVERY
        number = present[-1].number + 1 if present else 1
        one = _Object(number, self._writer, "all" if is_all else "changes")
        what = _Generation(1, list(counting.values()) if is_all else added, [] if is_all else gone)
        folder = f"{folder_of(state.server)}/catalog"
        state.bucket.put(gzip.compress(msgspec.json.encode(what), 6), f"{folder}/{one.name}")
        state.files, state.last = counting, one
        self._known = one
        self._numbers_since_all = 1 if is_all else self._numbers_since_all + 1
        # Readers may be at the former generation that lists every file: only older ones go.
        former = [other.number for other in present if other.kind == "all"] if is_all else []
        for other in present:
            if former and other.number < former[-1]:
                state.bucket.delete(f"{folder}/{other.name}")
        return len(added) + len(gone)

    def _check_name(self) -> None:
        """Raises NameTakenError where somebody else has published since this one read or wrote."""
        known, newest = self._known, self.state.last
        is_other = (
            known is not None
            and newest is not None
            and newest != known
            and newest.writer != self._writer
        )
        if is_other or self._is_displaced:
            self._is_displaced = True
            raise NameTakenError(
                f"another server publishes as {self.state.server}: give each its own --server-name"
            )

    def absent_s(self, path: str) -> float:
        """Seconds since this method was first called for a file that is no longer published; 0 for
        one that is. The true time is longer."""
        if path in self.state.files:
            return 0.0
        now = time.monotonic()
        return now - self._absent_since.setdefault(path, now)

    def forget(self, path: str) -> None:
        """Drop what `absent_s` keeps of a path."""
        self._absent_since.pop(path, None)
