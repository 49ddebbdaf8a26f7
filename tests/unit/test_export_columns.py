# SPDX-License-Identifier: Apache-2.0
"""What exporters write by column is what they would write row by row."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pyarrow as pa
import pytest

from sonde.export import json_columns, protobuf_columns, strict_json
from sonde.export.json_columns import Coded, Rows
from sonde.export.pprof_profile_pb2 import Label
from sonde.model.code import Frame, Stacks
from sonde.query.identities import identities
from sonde.query.own_frames import own_frame, own_frames
from sonde.query.schema import TABLES

NAMES = ["", "plain", 'a "b"\\\n', "ü€\U0001f600", "\x7f\x00", "\udcff", "x" * 70_000]


def written(rows: Rows) -> str:
    out: list[bytes] = []
    strict_json.write_indented(out.append, {"rows": strict_json.Lazy(lambda: rows), "end": 1})
    return b"".join(out).decode()


@pytest.mark.parametrize("count", [0, 1, 5_000])
def test_rows_by_column_are_the_json_of_objects(count: int) -> None:
    index = np.arange(count) % len(NAMES)
    index[100:] %= 3  # few of the long ones
    values = [{"user": name, "pid": len(name)} for name in NAMES]
    ints = np.arange(count, dtype=np.uint64) * 3_000_000_000
    floats = np.arange(count) * 0.5
    rows = Rows(
        {
            "name": Coded(NAMES, index),
            "of": Coded(values, index),
            "is": Coded((False, True), index % 2),
            "ns": ints,
            "rounded": floats,
            "huge": floats * 1e30,
        }
    )
    objects = [
        {
            "name": NAMES[at],
            "of": values[at],
            "is": bool(at % 2),
            "ns": number,
            "rounded": round(half),
            "huge": round(half * 1e30),
        }
        for at, number, half in zip(index.tolist(), ints.tolist(), floats.tolist(), strict=True)
    ]
    assert written(rows) == json.dumps({"rows": objects, "end": 1}, indent=1)


def test_rows_with_long_texts_are_written_few_at_a_time() -> None:
    sizes = np.array([10, 2 << 20, 10, 10, 900_000, 900_000])
    assert [*json_columns.blocks(sizes)] == [slice(0, 1), slice(1, 2), slice(2, 5), slice(5, 6)]


def test_varints_are_those_of_protobuf() -> None:
    numbers = np.array([0, 1, 127, 128, 16_383, 16_384, (1 << 62) + 5, -1, -(1 << 62)], np.int64)
    found = protobuf_columns.number_fields(Label.NUM_FIELD_NUMBER, numbers).to_pylist()
    assert found == [Label(num=number).SerializeToString() for number in numbers.tolist()]
    packed = protobuf_columns.varints(numbers)
    assert packed.to_pylist() == [*map(protobuf_columns.varint, numbers.tolist())]
    assert (protobuf_columns.varint_lengths(numbers) == protobuf_columns.lengths(packed)).all()
    assert protobuf_columns.content(packed.slice(2, 3)) == b"\x7f\x80\x01\xff\x7f"


def test_own_frames_are_those_found_one_by_one() -> None:
    kinds, functions = ("user", "kernel", "python"), ("", "f")
    binaries = ("libc.so.6", "app", "[anon]", "")
    frames = [Frame(*texts) for texts in product(kinds, functions, binaries)]
    random = np.random.default_rng(1)
    depths = random.integers(0, 5, 500)
    offsets = np.append(0, np.cumsum(depths)).astype(np.int32)
    flat = random.integers(0, len(frames), offsets[-1]).astype(np.int32)
    stacks = Stacks(frames, offsets.data, flat.data)
    wanted = np.arange(499, -1, -2)
    found = own_frames(stacks, wanted).tolist()
    expected = [own_frame(stacks, stack) for stack in wanted.tolist()]
    assert [frames[at] if at >= 0 else None for at in found] == expected


def table(name: str, rows: list[tuple[int, int, int]]) -> pa.Table:
    """Rows of (pid, start_ns, tid); other columns are 0 or ''."""
    columns = {}
    for field in TABLES[name]:
        known = ("pid", "start_ns", "tid")
        if field.name in known:
            values = [row[known.index(field.name)] for row in rows]
            columns[field.name] = pa.array(values, field.type)
        else:
            text = pa.types.is_string(field.type) or pa.types.is_dictionary(field.type)
            kind = pa.string() if text else field.type
            columns[field.name] = pa.array([None] * len(rows), kind).cast(field.type)
    return pa.table(columns, schema=TABLES[name])


def test_processes_and_threads_are_numbered_by_who_they_are() -> None:
    big = (1 << 64) - 1  # a start that no signed number holds
    tables = {name: schema.empty_table() for name, schema in TABLES.items()}
    tables["process"] = table("process", [(7, 1, 0), (3, big, 0)])
    tables["sample"] = table("sample", [(3, big, 5), (9, 2, 9), (7, 1, 8)])
    tables["activity"] = table("activity", [(7, 1, 7), (9, 1, 9), (3, big, 5)])
    tables["usage"] = table("usage", [(8, 4, 0), (7, 1, 0)])
    tables["thread"] = table("thread", [(1, 1, 1), (7, 1, 8), (7, 1, 6)])
    found = identities(tables)
    unnamed = found.unnamed.to_pydict()
    assert unnamed == {"pid": [8, 9, 9], "start_ns": [4, 1, 2]}
    assert found.process_of["sample"].tolist() == [1, 4, 0]
    assert found.process_of["usage"].tolist() == [2, 0]
    threads = found.threads.to_pydict()
    assert threads["tid"] == [5, 6, 7, 8, 9, 9]
    assert threads["process"] == [1, 0, 0, 0, 3, 4]
    assert threads["start_ns"] == [big, 1, 1, 1, 1, 2]
    assert threads["row"] == [-1, 2, -1, 1, -1, -1]
    assert found.thread_of["sample"].tolist() == [0, 5, 3]
    assert found.thread_of["activity"].tolist() == [2, 4, 0]
    assert found.thread_of["device_run"].tolist() == []
