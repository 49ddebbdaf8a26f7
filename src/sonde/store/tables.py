# SPDX-License-Identifier: Apache-2.0
"""Rows of chunks of many nodes as the tables of the store.

What changes on the way from a chunk (abi/tables.json):

- times are ns since 1970, int64; every other number is signed, too, because Spark has no others;
- `node` names the machine;
- keys of frames and stacks are 64 bits of a keyed hash of their content, so that one stack has one
  key whichever process, recording and node saw it, and needs to be stored once. The hash's key is
  the store's secret: without it nobody can make a stack that takes another one's place;
- rows of `process` and `thread` have a `key` as well, and are stored once;
- the table `chunk` has a row for each chunk: what a recount is made from.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

DICTIONARIES = ("frame", "stack", "process", "thread")
"""Tables whose rows are stored once a tenant and day, told apart by `key`."""
TIMES = ("time_ns", "start_time_ns", "end_time_ns")
CHUNK = pa.schema(
    {
        "digest": pa.binary(16),
        "node": pa.string(),
        "capture": pa.string(),
        "seq": pa.int64(),
        "start_ns": pa.int64(),
        "end_ns": pa.int64(),
        "wall_offset_ns": pa.int64(),
        "received_ns": pa.int64(),
        "size_bytes": pa.int64(),
        "sample_rows": pa.int64(),
        "about": pa.string(),
    }
)
_FACTOR = np.uint64(int.from_bytes(os.urandom(8), "little") | 1)
"""Odd: multiplying by it loses nothing modulo 2^64. Drawn for each process, as `_CHUNK_FACTOR`: who
chooses the ids of a chunk cannot know which would equal those of another chunk."""
_CHUNK_FACTOR = np.uint64(int.from_bytes(os.urandom(8), "little") | 1)
"""Another odd one."""

CHUNK_NUMBER = "carry_chunk"
"""Column of every table of a batch: which of its chunks a row is from."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A chunk of a batch, without its rows."""

    tenant: str
    node: str
    digest: bytes
    received_ns: int
    size_bytes: int
    meta: dict[str, Any]

    @property
    def start_ns(self) -> int:
        """Since 1970, as `end_ns`."""
        return int(self.meta["start_ns"] + self.meta["wall_offset_ns"])

    @property
    def end_ns(self) -> int:
        """When it ended."""
        return int(self.meta["end_ns"] + self.meta["wall_offset_ns"])


def time_column(name: str) -> str:
    """What rows of a table are ordered and chosen by."""
    if name == "chunk":
        return "start_ns"
    return "start_time_ns" if name in ("span", "device_run") else "time_ns"


@dataclass(frozen=True, slots=True)
class Hasher:
    """Keys by content: 64 bits that nobody can foresee without the secret."""

    engine: duckdb.DuckDBPyConnection
    secret: bytes
    """32 bytes, the same for the life of the store."""

    def of_rows(self, table: pa.Table) -> Any:
        """64 bits of the MD5 of the secret and each row's values."""
        texts = (f"coalesce(CAST({_quoted(n)} AS VARCHAR), '')" for n in table.column_names)
        # With their lengths: no text can look like the end of one and the begin of another.
        parts = " || ".join(f"length({text}) || ':' || {text}" for text in texts)
        self.engine.register("rows_to_hash", table)
        try:
            found = self.engine.sql(
                f"SELECT md5_number_lower(? || {parts}) AS key FROM rows_to_hash",
                params=[self.secret.hex()],
            ).to_arrow_table()
        finally:
            self.engine.unregister("rows_to_hash")
        return found.column("key").to_numpy()

    def of_lists(self, keys: Any, offsets: Any, complete: Any) -> Any:
        """64 bits of the keyed BLAKE2b of each list of keys, and whether it is complete."""
        whole = memoryview(np.ascontiguousarray(keys, np.uint64).tobytes())
        places = (8 * (offsets - offsets[0])).tolist()
        flags = [b"\x01" if it else b"\x00" for it in complete.tolist()]
        start = blake2b(digest_size=8, key=self.secret)
        digests = bytearray()
        for first, last, flag in zip(places, places[1:], flags, strict=False):
            one = start.copy()
            one.update(flag)
            one.update(whole[first:last])
            digests += one.digest()
        return np.frombuffer(bytes(digests), np.uint64)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def stored_tables(
    origins: list[Origin], tables: dict[str, pa.Table], hasher: Hasher
) -> dict[str, pa.Table]:
    """The rows of chunks by table of the store.

    `tables`: as in a chunk, of all chunks together, each with the column CHUNK_NUMBER.
    """
    found: dict[str, pa.Table] = {}
    frame_ids, frame_keys = np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    frames = tables.get("frame")
    if frames is not None and frames.num_rows:
        frame_ids = _local_ids(frames, "frame_id")
        frames = _signed_columns(frames.drop_columns(["frame_id", CHUNK_NUMBER]))
        frame_keys = hasher.of_rows(frames)
        found["frame"] = frames.append_column("key", pa.array(_signed(frame_keys)))
    stack_ids, stack_keys = np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    stacks = tables.get("stack")
    if stacks is not None and stacks.num_rows:
        stack_ids = _local_ids(stacks, "stack_id")
        found["stack"], stack_keys = _stacks(stacks, frame_ids, frame_keys, hasher)
    for name, table in tables.items():
        if name not in ("frame", "stack") and table.num_rows:
            found[name] = _rows(name, table, origins, (stack_ids, stack_keys))
    for name in ("process", "thread"):
        if name in found:
            keys = hasher.of_rows(found[name].drop_columns(["time_ns"]))
            found[name] = found[name].append_column("key", pa.array(_signed(keys)))
    found["chunk"] = _chunk_rows(origins, tables.get("sample"))
    return {name: _once(table) if name in DICTIONARIES else table for name, table in found.items()}


def _once(table: pa.Table) -> pa.Table:
    """The first row of each key."""
    _, first = np.unique(table.column("key").to_numpy(), return_index=True)
    return table if len(first) == table.num_rows else table.take(pa.array(np.sort(first)))


def _local_ids(table: pa.Table, column: str) -> Any:
    """Ids that count within their chunk alone, made different for each chunk of the batch."""
    return _local(
        table.column(column).to_numpy(), table.column(CHUNK_NUMBER).to_numpy().astype(np.uint64)
    )


def _local(ids: Any, chunks: Any) -> Any:
    with np.errstate(over="ignore"):
        mixed = ids * _FACTOR + (chunks + np.uint64(1)) * _CHUNK_FACTOR
    return mixed ^ (mixed >> np.uint64(32))


def _places(ids: Any, known: Any) -> Any:
    """Index of each id among the known ones, their number where there is none."""
    found = pc.index_in(pa.array(ids), value_set=pa.array(known))
    return pc.fill_null(found, len(known)).to_numpy(zero_copy_only=False)


def _stacks(
    table: pa.Table, frame_ids: Any, frame_keys: Any, hasher: Hasher
) -> tuple[pa.Table, Any]:
    """(rows of `stack`, key of each)."""
    lists = table.column("frame_ids").combine_chunks()
    lists = pc.fill_null(lists, pa.scalar([], lists.type)) if lists.null_count else lists
    offsets = np.asarray(lists.offsets)
    chunks = np.repeat(table.column(CHUNK_NUMBER).to_numpy().astype(np.uint64), np.diff(offsets))
    flat = pc.fill_null(lists.flatten(), pa.scalar(0, lists.type.value_type))
    ids = _local(flat.to_numpy(zero_copy_only=False), chunks)
    keys = np.append(frame_keys, np.uint64(0))[_places(ids, frame_ids)]
    complete = pc.fill_null(table.column("complete"), False).to_numpy()
    stack_keys = hasher.of_lists(keys, offsets, complete)
    frame_lists = pa.ListArray.from_arrays(
        pa.array((offsets - offsets[0]).astype(np.int32)), pa.array(_signed(keys))
    )
    columns = {
        "frame_keys": frame_lists,
        "complete": pa.array(complete),
        "key": pa.array(_signed(stack_keys)),
    }
    return pa.table(columns), stack_keys


def _rows(name: str, table: pa.Table, origins: list[Origin], stacks: tuple[Any, Any]) -> pa.Table:
    numbers = table.column(CHUNK_NUMBER).to_numpy()
    if "stack_id" in table.column_names:
        ids, keys = stacks
        places = _places(_local_ids(table, "stack_id"), ids)
        found = _signed(np.append(keys, np.uint64(0))[places])
        table = table.drop_columns(["stack_id"]).append_column("stack", pa.array(found))
    table = _signed_columns(table.drop_columns([CHUNK_NUMBER]))
    if name in ("process", "thread"):
        ends = np.array([one.end_ns for one in origins], np.int64)
        table = table.append_column("time_ns", pa.array(ends[numbers]))
    else:
        shifts = pa.array(
            np.array([one.meta["wall_offset_ns"] for one in origins], np.int64)[numbers]
        )
        for column in TIMES:
            if column in table.column_names:
                at = table.schema.get_field_index(column)
                table = table.set_column(at, column, pc.add(table.column(column), shifts))
    names = sorted({one.node for one in origins})
    of_chunk = np.array([names.index(one.node) for one in origins], np.int32)
    nodes = pa.DictionaryArray.from_arrays(pa.array(of_chunk[numbers]), pa.array(names))
    return table.append_column("node", nodes)


def _text(text: str) -> str:
    """Without lone surrogates, which JSON can carry and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def _signed(values: Any) -> Any:
    return values.view(np.int64)


def _signed_columns(table: pa.Table) -> pa.Table:
    columns = {}
    for at, one in enumerate(table.schema):
        column = table.column(at)
        if pa.types.is_unsigned_integer(one.type):
            column = column.cast(pa.int64(), safe=False)
        columns[one.name] = column
    return pa.table(columns)


def _chunk_rows(origins: list[Origin], sample: pa.Table | None) -> pa.Table:
    samples = np.zeros(len(origins), np.int64)
    if sample is not None:
        samples = np.bincount(sample.column(CHUNK_NUMBER).to_numpy(), minlength=len(origins))
    rows = [
        {
            "digest": one.digest,
            "node": one.node,
            "capture": _text(str(one.meta["capture"].get("id", "")))[:64],
            "seq": one.meta["seq"],
            "start_ns": one.start_ns,
            "end_ns": one.end_ns,
            "wall_offset_ns": one.meta["wall_offset_ns"],
            "received_ns": one.received_ns,
            "size_bytes": one.size_bytes,
            "sample_rows": int(count),
            "about": json.dumps(one.meta["capture"])[:4096],
        }
        for one, count in zip(origins, samples, strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=CHUNK)
