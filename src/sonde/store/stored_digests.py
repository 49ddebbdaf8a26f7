# SPDX-License-Identifier: Apache-2.0
"""Whether old chunks, whose digests the catalog has dropped, are in the files."""

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
"""Digests of which the first 8 bytes are kept in memory."""


def column_of(
    catalog: Catalog, storage: DirectoryStorage, one: StoredFile, name: str, rows: Any = None
) -> Any:
    """A column of a file, of the rows that fulfil an expression. None where its object, or its
    content, is damaged, which is counted: a damaged file must not keep chunks from being stored.

    Raises OSError, BucketError where a later try may succeed.
    """
    try:
        path = storage.local(one)
        return pq.read_table(path, columns=[name], filters=rows).column(name)
    except (DamagedObjectError, pa.ArrowException, KeyError) as error:
        catalog.count(damaged_files=1)
        LOG.warning("%s is damaged and is not searched: %s", one.path, error)
        return None


_FEW_FILES = 256
"""Up to this number, entries of files that are gone may be kept; of more, half at most are."""


class StoredDigests:
    """Digests in the files of the table `chunk`, kept in memory up to `MAX_DIGESTS`: agents that
    come back after days send many old chunks, and files should not be read again for each."""

    def __init__(self, catalog: Catalog, storage: DirectoryStorage) -> None:
        self._storage, self._catalog = storage, catalog
        self._of_file: OrderedDict[str, Any] = OrderedDict()
        self._count = 0
        self._looked_at = _FEW_FILES
        """With how many entries those of files that are gone are dropped the next time."""

    def has(self, chunk: Origin) -> bool | None:
        """Whether a chunk is in the files; None: a file that may have it is damaged. Raises
        OSError."""
        prefix = np.frombuffer(chunk.digest[:8], np.int64)[0]
        found: bool | None = False
        # The times of a file that has the chunk include the chunk's end.
        for one in self._catalog.files(chunk.tenant, "chunk", chunk.end_ns, chunk.end_ns + 1):
            known = self._prefixes(one)
            if known is None:
                found = None
                continue
            at = int(np.searchsorted(known, prefix))
            if at < len(known) and known[at] == prefix:
                is_in = self._is_in(one, chunk.digest)
                if is_in:
                    return True
                found = None if is_in is None else found
        return found

    def _prefixes(self, one: StoredFile) -> Any:
        """The first 8 bytes of all digests of a file, sorted; None: it is damaged."""
        if one.path not in self._of_file:
            if len(self._of_file) >= self._looked_at:
                self._drop_gone()
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

    def _drop_gone(self) -> None:
        """Drop entries of files that the catalog does not count any more."""
        known = {one.path for one in self._catalog.files()}
        for path in [path for path in self._of_file if path not in known]:
            gone = self._of_file.pop(path)
            self._count -= 0 if gone is None else len(gone)
        self._looked_at = max(_FEW_FILES, 2 * len(self._of_file))

    def _is_in(self, one: StoredFile, digest: bytes) -> bool | None:
        rows = pc.field("digest") == digest
        found = column_of(self._catalog, self._storage, one, "digest", rows)
        return None if found is None else len(found) > 0
