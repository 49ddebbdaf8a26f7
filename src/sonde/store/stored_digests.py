# SPDX-License-Identifier: Apache-2.0
"""Which old chunks the files have, whose digests the catalog has forgotten."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sonde.store.bucket import DamagedObjectError
from sonde.store.catalog import Catalog, StoredFile
from sonde.store.storage import DirectoryStorage
from sonde.store.tables import Origin

LOG = logging.getLogger("sonde.store")

MAX_DIGESTS = 4 << 20
"""Whose beginnings (8 bytes) are kept in memory."""


def column_of(
    catalog: Catalog, storage: DirectoryStorage, one: StoredFile, name: str, chosen: Any = None
) -> Any:
    """A column of a file, of the rows that an expression chooses. None where its object, or what is
    in it, is damaged, which is counted: one file keeps nobody's chunks from being stored.

    Raises OSError, BucketError of what may pass.
    """
    try:
        path = storage.local(one)
        return pq.read_table(path, columns=[name], filters=chosen).column(name)
    except (DamagedObjectError, pa.ArrowException, KeyError) as error:
        catalog.count(damaged_files=1)
        LOG.warning("%s is damaged, and is not looked into: %s", one.path, error)
        return None


class StoredDigests:
    """Reads each file of the table `chunk` once, while what it has fits: senders that come back
    after days send many old chunks, and who claims old times would have all files read for
    each of his."""

    def __init__(self, catalog: Catalog, storage: DirectoryStorage) -> None:
        self._storage, self._catalog = storage, catalog
        self._of_file: OrderedDict[str, Any] = OrderedDict()
        self._count = 0

    def has(self, chunk: Origin) -> bool | None:
        """Whether a chunk is in the files; None: a file that may have it is damaged. Raises
        OSError."""
        begin = np.frombuffer(chunk.digest[:8], np.int64)[0]
        found: bool | None = False
        # A file with the chunk has the time of its end.
        for one in self._catalog.files(chunk.tenant, "chunk", chunk.end_ns, chunk.end_ns + 1):
            known = self._begins(one)
            if known is None:
                found = None
                continue
            at = int(np.searchsorted(known, begin))
            if at < len(known) and known[at] == begin:
                is_in = self._is_in(one, chunk.digest)
                if is_in:
                    return True
                found = None if is_in is None else found
        return found

    def _begins(self, one: StoredFile) -> Any:
        """Of all digests of a file, in order; None: it is damaged."""
        if one.path not in self._of_file:
            column = column_of(self._catalog, self._storage, one, "digest")
            known = None
            if column is not None:
                digests = b"".join(digest[:8] for digest in column.to_pylist())
                known = np.sort(np.frombuffer(digests, np.int64))
                self._count += len(known)
            self._of_file[one.path] = known
            while self._count > MAX_DIGESTS and len(self._of_file) > 1:
                gone = self._of_file.popitem(last=False)[1]
                self._count -= 0 if gone is None else len(gone)
        self._of_file.move_to_end(one.path)
        return self._of_file[one.path]

    def _is_in(self, one: StoredFile, digest: bytes) -> bool | None:
        chosen = pc.field("digest") == digest
        found = column_of(self._catalog, self._storage, one, "digest", chosen)
        return None if found is None else len(found) > 0
