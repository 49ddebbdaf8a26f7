# SPDX-License-Identifier: Apache-2.0
"""Rows of chunks of many nodes as the tables of the store.

What changes on the way from a chunk (abi/tables.json):

- times are ns since 1970, int64; every other number is signed, too, because Spark has no others;
- `node` names the machine;
- keys of frames and stacks are 64 bits of a keyed hash of their content, so that one stack has one
  key whichever process, recording and node saw it, and needs to be stored once. The hash's key is
  the store's secret: without it nobody can make a stack that takes another one's place;
- rows of `process` and `thread` have a `key` as well, and are stored once;
- the table `chunk` has a row for each chunk: its digest, times, size, and `about`, the JSON object
  `capture` of its metadata, cut after 4,096 characters.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sonde.query import selection
from sonde.query.validation import MAX_FRAMES

DICTIONARIES = ("frame", "stack", "process", "thread")
"""Tables whose rows are stored once for each tenant and day, distinguished by `key`."""
SUMMED_TABLE = selection.SUMMED_TABLE
"""Rows of `sample` of one compacted file, summed over its threads and times: without `tid`, with
`time_ns` (the least) and `rows` (how many). Each file has the name of the file that it sums."""
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
"""Odd, so that multiplication by it is injective modulo 2^64. Random in each process, as
`_CHUNK_FACTOR`: a sender that chooses the ids of a chunk cannot know which ids would equal those of
another chunk."""
_CHUNK_FACTOR = np.uint64(int.from_bytes(os.urandom(8), "little") | 1)
"""Another odd one."""
_FACTORS_BY_PLACE = tuple(np.frombuffer(os.urandom(8 * MAX_FRAMES), np.uint64) for _ in range(2))
"""Two random numbers for each position in a list, different in each process."""

_KNOWN_TEXTS, _KNOWN_CHARS = 50_000, 512
"""Number of texts, and most characters of one, whose hashes a `Hasher` remembers."""

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
    """The column by which rows of a table are sorted and selected."""
    if name == "chunk":
        return "start_ns"
    return "start_time_ns" if name in ("span", "device_run") else "time_ns"


class Hasher:
    """Keys by content: 64 bits that nobody can predict without the secret."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: 32 bytes, the same for the life of the store."""
        self._secret = secret
        self.words: tuple[int, int] = struct.unpack(
            "<2Q", blake2b(b"rows", digest_size=16, key=secret).digest()
        )
        """The key of SipHash for rows."""
        self._texts: dict[str, int] = {}

    def of_rows(self, table: pa.Table) -> Any:
        """SipHash-2-4 of each row's values, texts as 64 bits of their keyed BLAKE2b.

        Chunks repeat rows, so equal rows are hashed once.
        """
        rows, first = contents(table.columns)
        distinct = table.take(pa.array(first))
        return siphash(self.words, [self._word_of(column) for column in distinct.columns])[rows]

    def _word_of(self, column: pa.ChunkedArray) -> Any:
        """The 64-bit word of each value: a number itself, the hash of a text."""
        values = column.combine_chunks()
        kind = values.type
        if pa.types.is_string(kind) or pa.types.is_dictionary(kind):
            found = values if pa.types.is_dictionary(kind) else values.dictionary_encode()
            words = [self._text(text) for text in found.dictionary.to_pylist()]
            return np.array(words, np.uint64)[found.indices.to_numpy()]
        return values.to_numpy(zero_copy_only=False).astype(np.int64).view(np.uint64)

    def _text(self, text: str) -> int:
        word = self._texts.get(text)
        if word is None:
            digest = blake2b(text.encode(), digest_size=8, key=self._secret).digest()
            word = int.from_bytes(digest, "little")
            if len(text) <= _KNOWN_CHARS:
                if len(self._texts) >= _KNOWN_TEXTS:
                    self._texts.clear()
                self._texts[text] = word
        return word

    def of_lists(self, keys: Any, offsets: Any, complete: Any) -> Any:
        """64 bits of the keyed BLAKE2b of each list of keys and of whether it is complete.

        `offsets`: where each list starts in `keys`, and the end of the last; `complete`: a bool for
        each list.
        """
        keys = np.ascontiguousarray(keys, np.uint64)
        ends = offsets - offsets[0]
        rows, first = contents([complete, *_list_digests(keys, ends)])
        content = memoryview(keys.tobytes())
        start = blake2b(digest_size=8, key=self._secret)
        digests = bytearray()
        for at, end, is_complete in zip(
            (8 * ends[first]).tolist(),
            (8 * ends[first + 1]).tolist(),
            complete[first].tolist(),
            strict=True,
        ):
            one = start.copy()
            one.update(b"\x01" if is_complete else b"\x00")
            one.update(content[at:end])
            digests += one.digest()
        return np.frombuffer(bytes(digests), np.uint64)[rows]


def contents(columns: Sequence[Any]) -> tuple[Any, Any]:
    """Distinct rows: (for each row the number of its content, for each number the first row that
    has it). Exact, without hashing.

    `columns`: of Arrow, or NumPy arrays, all of the same length and without nulls.
    """
    rows = np.zeros(len(columns[0]), np.int64)
    count = 1
    for column in columns:
        numbers, values = _numbered(column)
        if count * values >= 1 << 62:
            rows, count = _numbered(rows)
        rows = rows * values + numbers
        count *= max(values, 1)
    rows, count = _numbered(rows)
    first = np.zeros(count, np.int64)
    first[rows[::-1]] = np.arange(len(rows) - 1, -1, -1)
    return rows, first


def _numbered(column: Any) -> tuple[Any, int]:
    """(number of each value, how many different ones there are)."""
    values = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else pa.array(column)
    found = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    return found.indices.to_numpy().astype(np.int64), len(found.dictionary)


def _list_digests(keys: Any, ends: Any) -> tuple[Any, Any, Any]:
    """(64 bits of a hash of each list of keys, 64 more, its length).

    Sums of products with random numbers that never leave this process: two different lists have the
    same hash with a probability of about 2^-120.
    """
    lengths = np.diff(ends)
    within = np.arange(len(keys)) - np.repeat(ends[:-1], lengths)
    found = []
    with np.errstate(over="ignore"):
        for factors in _FACTORS_BY_PLACE:
            products = keys * factors[within]
            sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(products, dtype=np.uint64)])
            found.append(sums[ends[1:]] - sums[ends[:-1]])
    return found[0], found[1], lengths


def siphash(key: tuple[int, int], words: Sequence[Any]) -> Any:
    """SipHash-2-4 of rows of 64-bit words, given by column (Aumasson, Bernstein 2012).

    The result is that of the bytes of a row's words, little endian. `key`: its two 64-bit halves.
    """
    rows = len(words[0])
    low, high = (np.full(rows, part, np.uint64) for part in key)
    v0, v1, v2, v3 = (
        part ^ np.uint64(int.from_bytes(letters, "big"))
        for part, letters in zip(
            (low, high, low, high),
            (b"somepseu", b"dorandom", b"lygenera", b"tedbytes"),
            strict=True,
        )
    )
    with np.errstate(over="ignore"):
        for word in (*words, np.full(rows, (8 * len(words) & 0xFF) << 56, np.uint64)):
            v3 ^= word
            for _ in range(2):
                _sip_round(v0, v1, v2, v3)
            v0 ^= word
        v2 ^= np.uint64(0xFF)
        for _ in range(4):
            _sip_round(v0, v1, v2, v3)
    return v0 ^ v1 ^ v2 ^ v3


def _sip_round(v0: Any, v1: Any, v2: Any, v3: Any) -> None:
    """One round, in place."""
    for one, other, bits, swapped in ((v0, v1, 13, True), (v2, v3, 16, False)):
        one += other
        _rotate(other, bits)
        other ^= one
        if swapped:
            _rotate(one, 32)
    for one, other, bits, swapped in ((v0, v3, 21, False), (v2, v1, 17, True)):
        one += other
        _rotate(other, bits)
        other ^= one
        if swapped:
            _rotate(one, 32)


def _rotate(words: Any, bits: int) -> None:
    right = words >> np.uint64(64 - bits)
    words <<= np.uint64(bits)
    words |= right


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
    samples = np.zeros(len(origins), np.int64)
    if "sample" in tables:
        numbers = tables["sample"].column(CHUNK_NUMBER).to_numpy()
        samples = np.bincount(numbers, minlength=len(origins))
    found["chunk"] = chunk_rows(origins, samples)
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
    """A 64-bit mix of each id and the number of its chunk."""
    with np.errstate(over="ignore"):
        mixed = ids * _FACTOR + (chunks + np.uint64(1)) * _CHUNK_FACTOR
    return mixed ^ (mixed >> np.uint64(32))


def _index_in(ids: Any, known: Any) -> Any:
    """Index of each id in `known`; `len(known)` where it is not there."""
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
    keys = np.append(frame_keys, np.uint64(0))[_index_in(ids, frame_ids)]
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
    """Rows of another table than `stack` and `frame`: with the node, times since 1970 and keys of
    stacks. `stacks`: ids (`_local_ids`) and keys."""
    numbers = table.column(CHUNK_NUMBER).to_numpy()
    if "stack_id" in table.column_names:
        ids, keys = stacks
        rows = _index_in(_local_ids(table, "stack_id"), ids)
        found = _signed(np.append(keys, np.uint64(0))[rows])
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
    """A text without lone surrogates, which JSON can hold and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def _signed(values: Any) -> Any:
    return values.view(np.int64)


def _signed_columns(table: pa.Table) -> pa.Table:
    """The table with unsigned columns as int64; values from 2^63 on become negative."""
    columns = {}
    for at, one in enumerate(table.schema):
        column = table.column(at)
        if pa.types.is_unsigned_integer(one.type):
            column = column.cast(pa.int64(), safe=False)
        columns[one.name] = column
    return pa.table(columns)


def chunk_rows(origins: list[Origin], samples: Any) -> pa.Table:
    """Rows of the table `chunk`; `samples`: how many rows of `sample` each chunk has."""
    columns = {
        "digest": [one.digest for one in origins],
        "node": [one.node for one in origins],
        "capture": [_text(str(one.meta["capture"].get("id", "")))[:64] for one in origins],
        "seq": [one.meta["seq"] for one in origins],
        "start_ns": [one.start_ns for one in origins],
        "end_ns": [one.end_ns for one in origins],
        "wall_offset_ns": [one.meta["wall_offset_ns"] for one in origins],
        "received_ns": [one.received_ns for one in origins],
        "size_bytes": [one.size_bytes for one in origins],
        "sample_rows": np.asarray(samples, np.int64),
        "about": [json.dumps(one.meta["capture"])[:4096] for one in origins],
    }
    return pa.table(columns, schema=CHUNK)
