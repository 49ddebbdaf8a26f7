# SPDX-License-Identifier: Apache-2.0
"""Frames of inlined functions in the tables of a capture: tables in, tables out."""

from __future__ import annotations

import pyarrow as pa

from sonde.query.inlined import offsets_without_line, with_lines
from sonde.query.schema import TABLES


def frame(number, kind="user", build_id="aa", offset=0, line=0, function="f"):
    return {
        "frame_id": number,
        "kind": kind,
        "function": function,
        "binary": "program",
        "build_id": build_id,
        "offset": offset,
        "file": "",
        "line": line,
    }


def tables(frames, stacks):
    rows = [{"stack_id": i, "frame_ids": ids, "complete": True} for i, ids in enumerate(stacks, 1)]
    return {
        "frame": pa.Table.from_pylist(frames, schema=TABLES["frame"]),
        "stack": pa.Table.from_pylist(rows, schema=TABLES["stack"]),
        "sample": TABLES["sample"].empty_table(),
    }


def test_only_user_code_without_a_line_is_asked_for():
    frames = [
        frame(1, offset=16),
        frame(2, offset=32),
        frame(3, kind="kernel", offset=48),
        frame(4, build_id="", offset=64),
        frame(5, line=7, offset=80),
    ]
    assert offsets_without_line(tables(frames, [])) == {"aa": [16, 32]}


def test_inlined_functions_come_before_the_one_they_are_in():
    before = tables([frame(1, offset=16), frame(2, offset=32, function="")], [[1, 2], [2]])
    places = {
        ("aa", 16): [("g", "a.h", 3), ("h", "a.h", 5), ("f(int)", "a.cpp", 7)],
        ("aa", 32): [("main", "a.cpp", 9)],
    }
    after = with_lines(before, places)
    rows = {row["frame_id"]: row for row in after["frame"].to_pylist()}
    stacks = [
        [(rows[it]["kind"], rows[it]["function"], rows[it]["line"]) for it in stack["frame_ids"]]
        for stack in after["stack"].to_pylist()
    ]
    main = ("user", "main", 9)
    assert stacks == [[("inlined", "g", 3), ("inlined", "h", 5), ("user", "f", 7), main], [main]]
    assert after["sample"] is before["sample"]
    assert with_lines(before, places)["stack"].equals(after["stack"])


def test_nothing_known_changes_nothing():
    before = tables([frame(1)], [[1, 1]])
    after = with_lines(before, {})
    assert after["frame"].equals(before["frame"])
    assert after["stack"].equals(before["stack"])
