# SPDX-License-Identifier: Apache-2.0
"""Native code and Arrow make the same rows of the same chunks, or native code refuses them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import captures
from sonde import _native
from sonde.errors import CaptureError
from sonde.query.capture import DamagedChunkError, chunk_meta
from sonde.query.framing import CHUNK_HEADER, WITH_LENGTHS
from sonde.query.validation import MAX_NUMBER, MAX_WEIGHT
from sonde.store.chunks import OpenedChunk, joined, open_chunk
from sonde.store.record import Record, digest_of
from sonde.store.row_reader import RowReader
from sonde.store.tables import Hasher, stored_tables
from stored_chunks import as_of, meta_of, recorded

CHUNKS = recorded()
NOW_NS = 1_800_001_800 * 10**9
SECRET = bytes(range(32))


def opened(body: bytes, node: str = "n") -> OpenedChunk:
    return open_chunk(Record("lab", node, digest_of("lab", node, body), NOW_NS, body))


def by_arrow(chunks: list[OpenedChunk]) -> tuple[dict[str, pa.Table], int]:
    tables, refused = joined(chunks)
    return stored_tables([one.origin for one in chunks], tables, Hasher(SECRET)), refused


def rows(table: pa.Table) -> list[str]:
    """The rows of a table in any order, columns by name."""
    names = sorted(table.column_names)
    columns = [table.column(name).to_pylist() for name in names]
    found = zip(*columns, strict=True)
    return sorted(map(repr, found))


def same(one: dict[str, pa.Table], other: dict[str, pa.Table]) -> None:
    assert sorted(one) == sorted(other)
    for name, table in one.items():
        types = {field.name: str(field.type) for field in table.schema}
        expected = {field.name: str(field.type) for field in other[name].schema}
        assert {k: v.replace(" not null", "") for k, v in types.items()} == expected, name
        assert rows(table) == rows(other[name]), name


def test_both_make_the_same_rows_of_what_agents_sent() -> None:
    chunks = [
        opened(as_of(body, f"node-{seq % 3}", seq, NOW_NS + seq * 10**9), f"node-{seq % 3}")
        for seq, body in enumerate(CHUNKS)
    ]
    # In the order of native code, so that of rows that are kept once both keep the same.
    chunks.sort(key=lambda one: (one.origin.node, one.origin.start_ns))
    reader = RowReader(SECRET)
    for some in (chunks, chunks[:7], chunks[7:8]):
        tables, left_out, is_sorted = reader.read(some)
        expected, refused = by_arrow(some)
        assert (left_out, is_sorted, reader.refused_batches) == (refused, True, 0)
        same(tables, expected)
        sample = tables["sample"]
        nodes = sample.column("node").to_pylist()
        assert nodes == sorted(nodes)


def encoded_again(chunk: OpenedChunk, packed: int | None) -> OpenedChunk:
    """The rows of a chunk as an agent encodes them for a server, or for a file."""
    given, _ = joined([chunk])
    tables = []
    for name, table in given.items():
        names = [it for it in table.column_names if not it.startswith("carry_")]
        parts = [table.slice(0, table.num_rows // 3), table.slice(table.num_rows // 3)]
        tables.append((name, [part.select(names).to_pydict() for part in parts]))
    meta = json.dumps(chunk_meta(chunk.raw.meta))
    return opened(_native.encode_chunk(meta, tables, packed))


def test_a_packed_chunk_makes_the_same_rows() -> None:
    for seq, body in enumerate(CHUNKS):
        chunk = opened(as_of(body, "n", seq, NOW_NS))
        packed, plain = encoded_again(chunk, 6), encoded_again(chunk, None)
        assert (packed.raw.has_lengths, plain.raw.has_lengths) == (True, False)
        assert len(packed.raw.payload) < len(plain.raw.payload)
        reader = RowReader(SECRET)
        (one, _, _), (other, _, _) = reader.read([packed]), reader.read([plain])
        assert reader.refused_batches == 0
        by_arrow_too, _ = by_arrow([packed])
        for name in ("frame", "process", "thread"):  # of equal keys the first row is kept
            assert set(one[name]["key"].to_pylist()) == set(other[name]["key"].to_pylist())
        for tables in (one, other, by_arrow_too):
            del tables["chunk"]
        same(one, by_arrow_too)
        same(one, other)


@pytest.mark.parametrize(
    "list_", [b"\xff\xff\xff\xff", b"\1\0\0\0", b"\0\0\0\0\xff\xff\xff\xff\1\0\0\0"]
)
def test_a_chunk_with_a_wrong_list_of_lengths_is_refused(list_: bytes) -> None:
    """Such a chunk costs itself: neither native code nor Arrow reads it."""
    tables = {"metric": captures.filled("metric", [{"series": "a"}])}
    given = captures.meta()
    body = captures.chunk(tables, version=WITH_LENGTHS, after=list_, **given)
    chunk = opened(body)
    assert chunk.raw.has_lengths
    with pytest.raises((DamagedChunkError, CaptureError)):
        RowReader(SECRET).read([chunk])


def test_rows_of_nodes_are_together_whatever_the_order_of_their_chunks() -> None:
    chunks = [opened(as_of(CHUNKS[0], "r", seq, NOW_NS), f"n{seq % 5}") for seq in range(20)]
    random.Random(1).shuffle(chunks)
    tables, _, _ = RowReader(SECRET).read(chunks)
    nodes = tables["metric"].column("node").to_pylist()
    assert nodes == sorted(nodes) and len(set(nodes)) == 5
    of_chunks = tables["chunk"]
    assert pc.sum(of_chunks.column("sample_rows")).as_py() == tables["sample"].num_rows


def chunk(tables: dict[str, pa.Table], **meta: Any) -> bytes:
    given: dict[str, Any] = {"seq": 0, "start_ns": 10**9, "end_ns": 2 * 10**9}
    given |= {"wall_offset_ns": NOW_NS, "capture": {"id": "x", "host": {"name": "h", "cpus": 1}}}
    content: bytes = captures.chunk(tables, **{**given, **meta})
    return content


def sample(**columns: Any) -> pa.Table:
    count = 3
    zeros = np.zeros(count)
    whole = {"time_ns": "u8", "pid": "u4", "start_ns": "u8", "tid": "u4", "stack_id": "u8"}
    given: dict[str, Any] = {name: pa.array(zeros.astype(kind)) for name, kind in whole.items()}
    given |= dict.fromkeys(("weight_count", "weight_ns", "weight_bytes"), pa.array(zeros))
    given |= dict.fromkeys(("kind", "name"), pa.array(["x"] * count))
    return pa.table(given | columns)


def test_names_in_any_order_are_those_of_their_rows() -> None:
    choose = random.Random(2)
    some = ["", "a", "b", "ab", "abcdefgh", "abcdefgx", "xbcdefgh", "abcdefghi", "ä", "ö"]
    orders = [
        ["a"] * 200,  # one in all blocks of rows
        [""] * 200,
        ["a"] * 40 + ["b"] * 160,  # another one from within a block on, of the same length
        ["ab"] * 31 + ["a", "abc"] + ["ab"] * 167,  # a block as long as if it had one
        ["abcdefgh"] * 63 + ["abcdefgx"] + ["abcdefgh"] * 136,
        [some[row % 3] for row in range(200)],
        choose.choices(some, k=200),
    ]
    chunks = []
    for seq, names in enumerate(orders):
        three = sample()
        many = pa.concat_tables([three] * 67).slice(0, 200)
        many = many.set_column(many.schema.get_field_index("name"), "name", pa.array(names))
        numbers = pa.array(range(200), pa.uint64())
        many = many.set_column(many.schema.get_field_index("time_ns"), "time_ns", numbers)
        chunks.append(opened(chunk({"sample": many}, seq=seq)))
    reader = RowReader(SECRET)
    for part in (chunks, *([one] for one in chunks)):
        tables, _, _ = reader.read(part)
        same(tables, by_arrow(part)[0])
    assert reader.refused_batches == 0


def stack(lists: Any, ids: Any = (1,), complete: Any = (True,)) -> pa.Table:
    kind = pa.list_(pa.uint64())
    columns = {"stack_id": pa.array(ids, pa.uint64()), "frame_ids": pa.array(lists, kind)}
    return pa.table(columns | {"complete": pa.array(complete, pa.bool_())})


UNUSUAL: dict[str, dict[str, pa.Table]] = {
    "a value that is not a number": {"sample": sample(weight_ns=[0.0, float("nan"), 1.0])},
    "a weight below 0": {"sample": sample(weight_ns=[0.0, -1.0, 1.0])},
    "a weight that is too large": {"sample": sample(weight_ns=[0.0, 2 * MAX_WEIGHT, 1.0])},
    "a time that is too large": {
        "sample": sample(time_ns=pa.array([0, MAX_NUMBER + 1, 1], pa.uint64()))
    },
    "a value that is missing": {"sample": sample(name=["a", None, "b"])},
    "a column of another width": {"sample": sample(pid=pa.array([1, 2, 3], pa.uint64()))},
    "a column that nobody knows": {"sample": sample(other=[1, 2, 3])},
    "a text that is too long": {"sample": sample(name=["a", "b" * 20_000, "c"])},
    "a missing frame of a stack": {"stack": stack([[1, None]])},
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_what_no_writer_of_ours_makes_is_left_to_arrow(what: str) -> None:
    some = [opened(chunk(UNUSUAL[what])), opened(as_of(CHUNKS[0], "n", 1, NOW_NS))]
    reader = RowReader(SECRET)
    tables, left_out, is_sorted = reader.read(some)
    expected, refused = by_arrow(some)
    assert (reader.refused_batches, left_out, is_sorted) == (1, refused, False)
    same(tables, expected)


COMMON: dict[str, dict[str, pa.Table]] = {
    "stacks of frames that are not there": {
        "stack": stack([[7], [], [7]], (1, 2, 2), (True, False, True)),
        "sample": sample(stack_id=pa.array([1, 2, 9], pa.uint64())),
    },
    "an end before its start": {
        "device_run": pa.table(
            {"start_time_ns": pa.array([5], pa.uint64()), "end_time_ns": pa.array([3], pa.uint64())}
            | dict.fromkeys(
                ("kind", "name", "source", "direction", "grid", "block"), pa.array(["k"])
            )
            | dict.fromkeys(("pid", "tid", "device", "stream", "registers"), pa.array([1], "u4"))
            | dict.fromkeys(
                ("start_ns", "stack_id", "correlation", "window", "bytes", "shared_bytes"),
                pa.array([(1 << 63) - 1 >> 2], "u8"),
            )
            | {"weight": pa.array([1.0])}
        )
    },
    "the ends of what is valid": {
        "sample": sample(
            time_ns=pa.array([0, MAX_NUMBER, 1], pa.uint64()),
            start_ns=pa.array([0, (1 << 64) - 1, 1], pa.uint64()),
            pid=pa.array([0, (1 << 32) - 1, 1], pa.uint32()),
            weight_ns=[0.0, MAX_WEIGHT, -0.0],
            name=["", "\u00e4\U0001f600" * 10, "\x00"],
        )
    },
    "tables without rows": {"sample": sample().slice(0, 0), "stack": stack([], (), ())},
    "no tables": {},
}


@pytest.mark.parametrize("what", COMMON)
def test_unusual_content_that_is_valid_is_read_alike(what: str) -> None:
    some = [opened(chunk(COMMON[what], wall_offset_ns=offset)) for offset in (NOW_NS, 0)]
    some.sort(key=lambda one: one.origin.start_ns)
    reader = RowReader(SECRET)
    tables, left_out, _ = reader.read(some)
    expected, refused = by_arrow(some)
    assert (reader.refused_batches, left_out) == (0, refused)
    same(tables, expected)


def test_damage_is_refused_by_both_and_nothing_worse_happens() -> None:
    """Bytes of Arrow's messages are changed, under correct checksums."""
    draw = random.Random(7)
    body = min(CHUNKS, key=len)
    whole = opened(as_of(body, "n", 0, NOW_NS))
    raw = pa.decompress(
        whole.raw.payload, decompressed_size=whole.origin.meta["raw_len"], codec="zstd"
    ).to_pybytes()
    reader = RowReader(SECRET)
    for _ in range(300):
        changed = bytearray(raw)
        for _ in range(draw.choice((1, 1, 8))):
            # The beginnings of tables hold their messages.
            begin = draw.choice(whole.origin.meta["tables"])["offset"]
            changed[min(begin + draw.randrange(1_500), len(raw) - 1)] = draw.randrange(256)
        payload = pa.compress(bytes(changed), codec="zstd", asbytes=True)
        one = replace(whole, raw=replace(whole.raw, payload=payload))
        try:
            found = reader._in_native_code([one])
        except ValueError:
            continue
        try:
            expected, refused = by_arrow([one])
        except Exception:
            continue  # Arrow is stricter with what nobody reads (padding, metadata)
        assert refused == 0
        same(found, expected)


def test_descriptions_of_tables_that_lie_are_refused() -> None:
    body = as_of(min(CHUNKS, key=len), "n", 0, NOW_NS)
    assert len(body) > CHUNK_HEADER.size
    for change in (
        {"offset": 1 << 40}, {"length": 1 << 62}, {"offset": -8}, {"offset": "x"}, {"name": None},
    ):  # fmt: skip
        one = opened(body)
        meta = meta_of(body)
        meta["tables"] = [dict(meta["tables"][0], **change), *meta["tables"][1:]]
        one = replace(one, origin=replace(one.origin, meta=meta))
        with pytest.raises(ValueError, match=r"table|metadata"):
            RowReader(SECRET)._in_native_code([one])
