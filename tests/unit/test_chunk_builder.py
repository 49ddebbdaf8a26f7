# SPDX-License-Identifier: Apache-2.0
"""Rows of a chunk while it grows: what they take, and that none is changed by it."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

from sonde.query.capture import read
from sonde.sinks.capture import CaptureFile
from sonde.sinks.chunk import MIN_COMPACTED, ChunkBuilder

TICKS = 5


def rows(tick, count):
    """Of `activity`: numbers of one row are of no other, texts are of many."""
    who = 1 << 20
    return [
        (who + k, "blocked", "futex", "", "wait", "", 0, 7, who * k, 9, k + 300, who * tick + k,
         0, who + 2 * k, 5, 6)
        for k in range(count)
    ]  # fmt: skip


def filled(count, *, compacts):
    builder = ChunkBuilder(0)
    for tick in range(TICKS):
        builder.add("activity", rows(tick, count))
        builder.add("event", [(tick, "notice", "n", 1, 2, 1.5, "")])
        if compacts:
            builder.compact()
    return builder


def tables(builder, path):
    meta = {
        "seq": 0, "start_ns": 0, "end_ns": 10**9, "wall_offset_ns": 0, "last": True,
        "capture": {"id": "x", "version": "0", "host": {}},
    }  # fmt: skip
    sink = CaptureFile(path)
    sink.write(builder.encode(meta))
    sink.close()
    return {name: table.to_pylist() for name, table in read(path).tables.items()}


@pytest.mark.parametrize("count", [3, MIN_COMPACTED + 1])
def test_rows_are_the_same_and_in_order(tmp_path, count):
    as_added = tables(filled(count, compacts=False), tmp_path / "a.sonde")
    compacted = tables(filled(count, compacts=True), tmp_path / "b.sonde")

    assert len(as_added["activity"]) == TICKS * count
    assert compacted == as_added


def test_rows_of_many_ticks_take_little_memory():
    def taken(compacts):
        gc.collect()
        tracemalloc.start()
        try:
            builder = filled(4_000, compacts=compacts)
            gc.collect()
            return tracemalloc.get_traced_memory()[0], builder
        finally:
            tracemalloc.stop()

    assert taken(compacts=True)[0] < taken(compacts=False)[0] / 2
    assert taken(compacts=True)[0] < TICKS * 4_000 * 150


def drawn(tick):
    """Rows of `activity` as a node has them: some threads of some, in any order."""
    chance = random.Random(tick)
    return [
        (tick * 10**9, chance.choice(("blocked", "runqueue")), "futex", "", "futex", "", 0,
         tid // 8, 10**9 + tid // 8 * 12_345, tid, 1, chance.randrange(10**8), 0, 5, 0, 0)
        for tid in chance.sample(range(2_000), 400)
    ]  # fmt: skip


def test_a_packed_chunk_has_the_same_rows_and_takes_less(tmp_path):
    usual, packed = ChunkBuilder(0), ChunkBuilder(0, packed=True)
    for builder in (usual, packed):
        for tick in range(TICKS):
            builder.add("activity", drawn(tick))
            builder.compact()
    found, few = tables(usual, tmp_path / "a"), tables(packed, tmp_path / "b")
    assert sorted(map(repr, found["activity"])) == sorted(map(repr, few["activity"]))
    sizes = [(tmp_path / name).stat().st_size for name in "ab"]
    assert sizes[1] < 0.9 * sizes[0]


def test_rows_of_a_packed_chunk_that_are_joined_by_order_keep_it():
    builder = ChunkBuilder(0, packed=True)
    for tick in range(TICKS):
        builder.add("sample", [
            (tick, "blocked", name, 7, 1, 9, stack, 1.0, 1.0, 0.0)
            for stack, name in enumerate(("poll", "futex", "poll", "futex"))
        ])  # fmt: skip
    columns = builder._columns("sample", builder.rows["sample"])
    rows = zip(columns["name"], columns["time_ns"], columns["stack_id"], strict=True)
    assert list(rows) == [("futex", tick, stack) for tick in range(TICKS) for stack in (1, 3)] + [
        ("poll", tick, stack) for tick in range(TICKS) for stack in (0, 2)
    ]
