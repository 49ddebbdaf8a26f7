# SPDX-License-Identifier: Apache-2.0
"""Which old chunks the files have, whose digests the catalog has forgotten."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from sonde.store.catalog import Catalog, StoredFile
from sonde.store.storage import DirectoryStorage
from sonde.store.tables import Origin

MAX_DIGESTS = 4 << 20
"""Whose beginnings (8 bytes) are kept in memory."""


class StoredDigests:
    """Reads each file of the table `chunk` once, while what it has fits: senders that come back
    after days send many old chunks, and who claims old times would have all files read for
    each of his."""

    def __init__(self, catalog: Catalog, storage: DirectoryStorage) -> None:
        self._storage, self._catalog = storage, catalog
        self._of_file: OrderedDict[str, Any] = OrderedDict()
        self._count = 0

    def has(self, chunk: Origin) -> bool:
        """Whether a chunk is in the files. Raises OSError."""
        begin = np.frombuffer(chunk.digest[:8], np.int64)[0]
        # A file with the chunk has the time of its end.
        for one in self._catalog.files(chunk.tenant, "chunk", chunk.end_ns, chunk.end_ns + 1):
            known = self._begins(one)
            at = int(np.searchsorted(known, begin))
            if at < len(known) and known[at] == begin and self._is_in(one, chunk.digest):
                return True
        return False

    def _begins(self, one: StoredFile) -> Any:
        known = self._of_file.get(one.path)
        if known is None:
            column = pq.read_table(self._storage.local(one), columns=["digest"]).column("digest")
            digests = b"".join(digest[:8] for digest in column.to_pylist())
            known = self._of_file[one.path] = np.sort(np.frombuffer(digests, np.int64))
            self._count += len(known)
            while self._count > MAX_DIGESTS and len(self._of_file) > 1:
                self._count -= len(self._of_file.popitem(last=False)[1])
        self._of_file.move_to_end(one.path)
        return known

    def _is_in(self, one: StoredFile, digest: bytes) -> bool:
        filters = [("digest", "=", digest)]
        found = pq.read_table(self._storage.local(one), columns=["digest"], filters=filters)
        return bool(found.num_rows)
