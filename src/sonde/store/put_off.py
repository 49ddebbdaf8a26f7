# SPDX-License-Identifier: Apache-2.0
"""Chunks that tenants have in the log beyond their turn, and whose turn it is.

A chunk of 4 kB may take a second to store. So where a segment of the log has chunks of several
tenants, those of one beyond its turn are put off: they are copied to segments of that tenant alone,
which are stored in turns with those of other tenants and with new segments of the log.

```
DIR/wal/later/N.TENANT.open     being written; what is in it is also in a segment of the log
DIR/wal/later/N.TENANT.wal      records as in the log, of one tenant
```

The copy is on the disk before the catalog notes that the segment was read so far. After a crash in
between, the chunks are put off again, and each is stored once by its digest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Set
from pathlib import Path
from typing import BinaryIO

from sonde.store.record import Record, encode, scan
from sonde.store.wal import LATER, OPEN, SEALED, create, later_segments, sync_folder, tenant_of

MAX_OPEN = 64
"""Files that are written at a time."""
MAX_REMEMBERED = 4_096
"""Tenants whose turns are remembered."""


class PutOff:
    """Writes segments of single tenants. Only for the holder of `flush.lock`."""

    def __init__(self, wal: Path, secret: bytes) -> None:
        """`wal`: DIR/wal; `secret`: the log's. Removes what a crash left unsealed. Raises
        OSError."""
        self._folder, self._secret = wal / LATER, secret
        self._open: dict[str, tuple[Path, BinaryIO]] = {}
        """By tenant."""
        self._last = 0
        for path in self._folder.glob(f"*{OPEN}"):
            path.unlink()

    @property
    def is_full(self) -> bool:
        """Whether as many files are open as should be."""
        return len(self._open) >= MAX_OPEN

    def add(self, record: Record) -> None:
        """Write a record; it is not durable before `seal`. Raises OSError."""
        if record.tenant not in self._open:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            newest = max((int(one.name.partition(".")[0]) for one in self._names()), default=0)
            self._last = max(time.time_ns(), newest + 1, self._last + 1)
            path = self._folder / f"{self._last:020d}.{record.tenant}{OPEN}"
            self._open[record.tenant] = path, os.fdopen(create(path), "wb")
        self._open[record.tenant][1].writelines(encode(record, self._secret))

    def _names(self) -> Iterable[Path]:
        return self._folder.glob(f"*{SEALED}")

    def seal(self, like: Path) -> None:
        """Make what was added durable. The segments get the age of `like`, that they are copied
        from. Raises OSError; then nothing of it counts."""
        if not self._open:
            return
        at_ns = like.stat().st_mtime_ns
        while self._open:
            _, (path, file) = self._open.popitem()
            with file:
                file.flush()
                os.utime(path, ns=(at_ns, at_ns))
                os.fsync(file.fileno())
            path.rename(path.with_suffix(SEALED))
        sync_folder(self._folder)
        sync_folder(self._folder.parent)

    def drop(self) -> None:
        """Forget what was added and not sealed."""
        while self._open:
            _, (path, file) = self._open.popitem()
            file.close()
            path.unlink(missing_ok=True)


class Turns:
    """Which segment is read next."""

    def __init__(self, wal: Path, secret: bytes) -> None:
        """`wal`: DIR/wal; `secret`: the log's."""
        self._wal, self._secret = wal, secret
        self._tenants: dict[Path, str] = {}
        """The only tenant of a segment; '' of several."""
        self._served: dict[str, int] = {}
        """Number of the last turn of a tenant; the oldest turn first."""
        self._turns = 0
        self._alone: dict[str, list[Path]] = {}
        """The segments of single tenants, oldest first."""

    def look(self, sealed: list[Path], over: Set[Path]) -> list[Path]:
        """Note the segments that there are, `sealed` ones and those put off, without those that are
        `over`. Returns those of several tenants. Raises OSError."""
        later = [path for path in later_segments(self._wal) if path not in over]
        known = self._tenants
        self._tenants = {
            path: known[path] if path in known else self._only_tenant(path) for path in sealed
        }
        self._alone = {}
        for tenant, path in (
            *((tenant_of(path), path) for path in later),
            *((self._tenants[path], path) for path in sealed),
        ):
            if tenant:
                self._alone.setdefault(tenant, []).append(path)
        for paths in self._alone.values():
            if len(paths) > 1:  # what was put off is as old as what it was copied from
                paths.sort(key=lambda path: path.stat().st_mtime_ns)
        return [path for path in sealed if not self._tenants[path]]

    def waits(self, tenant: str) -> bool:
        """Whether chunks of a tenant were put off: later ones are stored after them."""
        return tenant in self._alone

    def put_off(self, tenant: str) -> None:
        """Note that a chunk of a tenant is put off."""
        self._alone.setdefault(tenant, [])

    def next(self) -> Path | None:
        """The segment of the tenant whose last turn is longest ago; None: there is none."""
        waiting = [tenant for tenant, paths in self._alone.items() if paths]
        if not waiting:
            return None
        tenant = min(waiting, key=lambda it: self._served.get(it, 0))
        self._turns += 1
        self._served.pop(tenant, None)
        self._served[tenant] = self._turns
        while len(self._served) > MAX_REMEMBERED:
            del self._served[next(iter(self._served))]
        return self._alone[tenant][0]

    def _only_tenant(self, path: Path) -> str:
        found = ""
        for one in scan(path, self._secret, bodies=False):
            if isinstance(one.item, Record) and one.item.tenant != found:
                if found:
                    return ""
                found = one.item.tenant
        return found
