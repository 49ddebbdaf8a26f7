# SPDX-License-Identifier: Apache-2.0
"""Parquet files: how rows are ordered and encoded, and when a file is durable.

```
DIR/data/TENANT/TABLE/day=2026-11-23/hour=08/ID.parquet      sorted by node
```

Rows of a node are next to one another, and row groups have statistics of node and time, so that a
query of one node reads only its part. Flushed files are sorted by node and time, which is fastest;
compaction sorts by `order_of`.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sonde.store.catalog import StoredFile
from sonde.store.tables import DICTIONARIES, TIMES, time_column
from sonde.store.wal import sync_folder

ROW_GROUP = 1 << 17
"""Rows in a row group."""
_ZSTD_LEVEL = 3
_FLUSHED_ZSTD_LEVEL = 1
"""Of flushed files, which compaction writes again. With this level, and statistics only of the
columns that questions filter by, writing takes a third less time and files are 2 % larger."""
_ENCODED = {
    **dict.fromkeys((*TIMES, "correlation"), "DELTA_BINARY_PACKED"),
    **dict.fromkeys(("weight_ns", "value", "ns", "max_ns"), "PLAIN"),
}
"""The encoding of columns that have no dictionary encoding."""
_SYNCING = ThreadPoolExecutor(8, "sonde-sync")
"""Not started for each batch: that took 3 % of the time in which a long log was flushed."""
_WRITING = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "sonde-write")
_MADE_DURABLE: set[Path] = set()
"""Folders whose names this process has synced."""


def write_file(
    folder: Path,
    tenant: str,
    name: str,
    day: str,
    hour: int,
    table: pa.Table,
    span_ns: tuple[int, int],
    is_sorted: bool = False,
) -> StoredFile:
    """Write a file of rows; it counts once it is durable and in the catalog.

    `span_ns`: a time that the file has in the catalog at least, such as that of its chunks;
    `is_sorted`: rows of a node are together already, in about the order of their times. Raises
    OSError.
    """
    if not is_sorted and "node" in table.column_names and name not in DICTIONARIES:
        table = _sorted(table, time_column(name))
    relative = Path("data", tenant, name, f"day={day}", f"hour={hour:02d}")
    path = relative / f"{uuid.uuid4().hex}.parquet"
    make_folders(folder, relative)
    least, most = span_ns
    if time_column(name) in table.column_names:
        times = pc.min_max(table.column(time_column(name))).as_py()
        least, most = min(least, times["min"]), max(most, times["max"])
    absolute = folder / path
    try:
        encoding = _encoding(table.schema, _FLUSHED_ZSTD_LEVEL)
        filtered = [one for one in ("node", *TIMES) if one in table.column_names]
        pq.write_table(
            table, absolute, row_group_size=ROW_GROUP, write_statistics=filtered, **encoding
        )
    except BaseException:
        absolute.unlink(missing_ok=True)
        raise
    size = absolute.stat().st_size
    return StoredFile(str(path), tenant, name, day, hour, least, most, table.num_rows, size, 0)


def write_batches(reader: pa.RecordBatchReader, path: Path) -> int:
    """Write rows that are sorted already; returns how many. Raises OSError."""
    rows = 0
    with pq.ParquetWriter(path, reader.schema, **_encoding(reader.schema)) as writer:
        for batch in reader:
            writer.write_batch(batch, row_group_size=ROW_GROUP)
            rows += batch.num_rows
    return rows


def order_of(name: str) -> tuple[str, ...]:
    """The columns by which compacted files of a table are sorted: first those that questions filter
    by, then those that bring similar rows together, which makes files a tenth smaller."""
    time = time_column(name)
    if name == "sample":
        return "node", "kind", time, "pid", "tid", "stack"
    if name == "activity":
        return "node", "kind", time, "pid", "tid", "name"
    if name == "span":
        return "node", "pid", "tid", time
    return "node", time


def _encoding(schema: pa.Schema, level: int = _ZSTD_LEVEL) -> dict[str, Any]:
    """How columns are encoded: times as differences, numbers that hardly repeat plainly, others
    with a dictionary.

    Measured on what real agents sent (docs/lab/service.md). Encodings that Spark cannot read are
    not used.
    """
    encoded = {one.name: _ENCODED[one.name] for one in schema if one.name in _ENCODED}
    return {
        "compression": "zstd",
        "compression_level": level,
        "use_dictionary": [one.name for one in schema if one.name not in encoded],
        "column_encoding": encoded,
    }


def write_all(writes: Sequence[Callable[[], StoredFile]], folder: Path) -> list[StoredFile]:
    """Call functions that write a file each (`write_file`), in parallel; where one fails, the files
    of all are removed. Raises OSError."""
    begun = [_WRITING.submit(one) for one in writes]
    wait(begun)
    try:
        return [one.result() for one in begun]
    except BaseException:
        remove(folder, [one.result() for one in begun if one.exception() is None])
        raise


def make_durable(folder: Path, files: Sequence[StoredFile]) -> None:
    """Sync files and their folders. Where that fails, the files are removed. Raises OSError."""
    parents = {(folder / one.path).parent for one in files}
    try:
        # In parallel: one commit of the file system's journal serves all that wait for it.
        list(_SYNCING.map(sync_file, [folder / one.path for one in files]))
        list(_SYNCING.map(sync_folder, parents))
    except BaseException:
        remove(folder, files)
        raise


def remove(folder: Path, files: Iterable[StoredFile]) -> None:
    """Remove files that no catalog names."""
    for one in files:
        (folder / one.path).unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Make the content of a file durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sorted(table: pa.Table, time: str) -> pa.Table:
    """By node, then by time."""
    node = table.column("node").combine_chunks()
    if not pa.types.is_dictionary(node.type):
        node = node.dictionary_encode()
    names = np.array(node.dictionary.to_pylist(), object)
    ranks = np.argsort(np.argsort(names))[node.indices.to_numpy()]
    times = table.column(time).to_numpy()
    least = int(times.min()) if len(times) else 0
    span = int(times.max()) - least + 1 if len(times) else 1
    if span * len(names) < 1 << 63:
        # One key, nearly sorted, since each chunk has its rows in about the order of time.
        order = np.argsort(ranks * span + (times - least), kind="stable")
    else:
        order = np.lexsort((times, ranks))
    return table.take(pa.array(order))


def make_folders(folder: Path, relative: Path) -> None:
    """Make the folders of a relative path, and sync each one's parent. Raises OSError."""
    at = folder
    for part in relative.parts:
        at /= part
        if at not in _MADE_DURABLE or not at.is_dir():
            at.mkdir(mode=0o700, exist_ok=True)
            sync_folder(at.parent)
            if len(_MADE_DURABLE) > 100_000:
                _MADE_DURABLE.clear()
            _MADE_DURABLE.add(at)
