# SPDX-License-Identifier: Apache-2.0
"""Rows of a chunk while it grows: what they take, and that none is changed by it."""

from __future__ import annotations

import gc
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
