# SPDX-License-Identifier: Apache-2.0
"""Rows of a chunk while it grows: what they take, and that none is changed by it."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

from sonde.query.capture import read
from sonde.sinks.capture import CaptureFile
from sonde.sinks.chunk import MIN_COMPACTED, ChunkBuilder, columns_of

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


def tables(builder, path, seq=0):
    meta = {
        "seq": seq, "start_ns": 0, "end_ns": 10**9, "wall_offset_ns": 0, "last": True,
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


def test_rows_of_a_packed_chunk_that_are_joined_by_order_keep_it(tmp_path):
    builder = ChunkBuilder(0, packed=True)
    for tick in range(TICKS):
        builder.add("sample", [
            (tick, "blocked", name, 7, 1, 9, 0, weight, 1.0, 0.0)
            for weight, name in enumerate(("poll", "futex", "poll", "futex"))
        ])  # fmt: skip
        builder.rows["sample"] *= tick != 2 or 300  # some rows are made columns before others
        builder.compact()
    expected = [row for row in builder_rows(builder) if row["name"] == "futex"]
    expected += [row for row in builder_rows(builder) if row["name"] == "poll"]
    rows = tables(builder, tmp_path / "a")["sample"]
    assert [(it["name"], it["time_ns"], it["weight_count"]) for it in rows] == [
        (it["name"], it["time_ns"], it["weight_count"]) for it in expected
    ]


def builder_rows(builder):
    """Rows of `sample` in the order in which they were added."""
    names = columns_of("sample")
    parts = [zip(*(part[name] for name in names), strict=True) for part in builder.parts["sample"]]
    rows = [row for part in parts for row in part] + builder.rows["sample"]
    return [dict(zip(names, row, strict=True)) for row in rows]


FRAMES = {(1 << 63) + 977 * k * k: f"function {k}" for k in range(40)}
STACKS = {(1 << 62) + 7_919 * k * k: [*FRAMES][k : 40 - k][:: (-1) ** k] for k in range(1, 18)}
LACKING = [*FRAMES][20]
"""A frame that the chunk lacks."""
UNKNOWN, NONE = 12_345, 0
"""Stacks that rows have: one that the chunk lacks, and none."""


def with_stacks(*, packed):
    """A chunk whose rows refer to stacks; frames and stacks in several parts and any order."""
    builder = ChunkBuilder(0, packed=packed)
    names = columns_of("frame")
    for part in (0, 1):
        ids = [it for it in [*FRAMES][part::2] if it != LACKING]
        frames = [(it, "user", FRAMES[it], "b", "", it % 97, "", 0, "") for it in ids]
        columns = dict(zip(names, zip(*frames, strict=True), strict=True))
        builder.add_part("frame", columns)
        builder.add("stack", [(it, STACKS[it], it % 2 == 0) for it in [*STACKS][part::2]])
    for weight, stack in enumerate([UNKNOWN, NONE, *STACKS, UNKNOWN]):
        row = (weight, "cpu", "", 7, 1, 9, stack, float(weight), 1.0, 0.0)
        builder.add("sample", [row])
        builder.add("traced", [(*row[:3], "t", "s", *row[3:9])])
        span = (weight, weight + 1, "blocked", "", "", "", 0, 7, 1, 9, stack, 0, 0, 0)
        builder.add("span", [span])
    return builder


def resolved(found):
    """For each row with a stack: when it was, and the stack's frames and whether it is whole, or
    what is known instead."""
    functions = {it["frame_id"]: (it["function"], it["offset"]) for it in found["frame"]}
    assert len(functions) == len(found["frame"])
    stacks = {it["stack_id"]: it for it in found["stack"]}
    assert len(stacks) == len(found["stack"])

    def frames(stack_id):
        if (stack := stacks.get(stack_id)) is None:
            return "none" if stack_id == NONE else "unknown"
        return [functions.get(it, "unknown") for it in stack["frame_ids"]], stack["complete"]

    at = {"sample": "time_ns", "traced": "time_ns", "span": "start_time_ns"}
    return {
        name: sorted((it[time], frames(it["stack_id"])) for it in found[name])
        for name, time in at.items()
    }


def test_rows_of_a_packed_chunk_have_their_stacks(tmp_path):
    usual = resolved(tables(with_stacks(packed=False), tmp_path / "a"))
    packed = tables(with_stacks(packed=True), tmp_path / "b")
    assert resolved(packed) == usual
    assert [it[1] for it in usual["span"]].count("unknown") == 2
    assert len({it["stack_id"] for it in packed["sample"]}) == 2 + len(STACKS)
    assert any("unknown" in it[1][0] for it in usual["span"] if isinstance(it[1], tuple))


def test_numbers_of_packed_chunks_are_small_and_of_each_chunk_others(tmp_path):
    of_chunk = [
        tables(with_stacks(packed=True), tmp_path / str(seq), seq=seq) for seq in (0, 1, 2**40 - 1)
    ]
    for key, name in (("stack_id", "stack"), ("frame_id", "frame")):
        ids = [{row[key] for row in found[name]} for found in of_chunk]
        assert max(ids[0]) < 100
        assert not ids[0] & ids[1]
        assert not any(NONE in it for it in ids)
    assert resolved(of_chunk[2]) == resolved(of_chunk[0])


def test_random_numbers_cost_a_packed_chunk_nothing():
    def size(factor):
        builder = ChunkBuilder(0, packed=True)
        ids = [k * factor % 2**64 for k in range(1, 2_000)]
        builder.add("frame", [(it, "user", "f", "b", "", k, "", 0, "") for k, it in enumerate(ids)])
        builder.add("stack", [(it, ids[k : k + 5], True) for k, it in enumerate(ids)])
        return len(builder.encode({"seq": 0}))

    assert size(0x9E3779B97F4A7C15) == size(1)
