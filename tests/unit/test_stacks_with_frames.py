# SPDX-License-Identifier: Apache-2.0
"""Which stacks of a capture hold which frames, however many parts they are looked through in."""

import random

import numpy as np
import pyarrow as pa
import pytest

from sonde.model.interner import Interner
from sonde.query import columns
from sonde.query.columns import Frames
from sonde.query.schema import TABLES

FUNCTIONS = ("work", "lock", "read", "", "schedule")
FILES = ("a.py", "b.py")
STACK_IDS = list(range(100, 160))


def tables(seed: int, parts: int) -> dict[str, pa.Table]:
    """60 stacks of up to 9 of 30 frames, some of them unknown or null, in `parts` of a table."""
    rng = random.Random(seed)
    frames = [
        {
            "frame_id": 7 * number,
            "kind": (kind := rng.choice(("python", "user", "kernel"))),
            "function": rng.choice(FUNCTIONS),
            "binary": "",
            "build_id": "",
            "offset": 0,
            "file": rng.choice(FILES) if kind == "python" else "",
            "line": 1,
            "origin": "",
        }
        for number in range(30)
    ]
    stacks = [
        {
            "stack_id": one,
            "frame_ids": [7 * rng.randrange(32) for _ in range(rng.randrange(10))],
            "complete": True,
        }
        for one in STACK_IDS
    ]
    stacks[9]["frame_ids"] = None  # a file may have that
    size = -(-len(stacks) // parts)
    return {
        "frame": pa.Table.from_pylist(frames, TABLES["frame"]),
        "stack": pa.concat_tables(
            pa.Table.from_pylist(stacks[at : at + size], TABLES["stack"])
            for at in range(0, len(stacks), size)
        ),
    }


@pytest.fixture(params=[(1, 1 << 18, 64), (7, 5, 64), (7, 5, 2)])
def cut(request, monkeypatch):
    """(parts of the table, frames looked at together, parts above which they are joined)."""
    parts, block, many = request.param
    monkeypatch.setattr(columns, "_BLOCK", block)
    monkeypatch.setattr(columns, "_MANY_PARTS", many)
    return parts


@pytest.mark.parametrize("seed", range(5))
def test_functions_are_found_together_as_one_by_one(cut, seed):
    made = tables(seed, cut)
    frames = Frames(made)
    wanted = ["work a.py", "lock b.py", "work", "schedule", "", "none", "none c.py"]
    rows = made["stack"].column("stack_id")
    held = {one["frame_id"]: one for one in made["frame"].to_pylist()}
    for function, found in zip(wanted, frames.holding_each(wanted), strict=True):
        one = frames.within(function)[frames.row_of(rows)] | frames.holding(rows, (function,))
        assert found[frames.row_of(rows)].tolist() == one.tolist()
        assert not found[-1]
        assert one.tolist() == [
            any(matches(held[it], function) for it in ids or () if it in held)
            for ids in made["stack"].column("frame_ids").to_pylist()
        ]


def matches(frame: dict[str, str], function: str) -> bool:
    if frame["kind"] == "python":
        return f"{frame['function']} {frame['file']}" == function
    return frame["function"] == function


@pytest.mark.parametrize("seed", range(5))
def test_the_innermost_named_function_outside_the_kernel(cut, seed):
    made, naming = tables(seed, cut), Interner()
    asked = [STACK_IDS[3], 5, *STACK_IDS[::-1]]  # 5 is no stack
    found = Frames(made).functions(naming, pa.chunked_array([pa.array(asked, pa.uint64())]))
    held = {one["frame_id"]: one for one in made["frame"].to_pylist()}
    stacks = {one["stack_id"]: one["frame_ids"] for one in made["stack"].to_pylist()}
    for stack, number in zip(asked, found.tolist(), strict=True):
        named = [
            held[it]["function"]
            for it in stacks.get(stack) or ()
            if it in held and held[it]["kind"] != "kernel" and held[it]["function"]
        ]
        assert naming.names[number] == (named[0] if named else "")


def test_of_no_stacks():
    made = {name: TABLES[name].empty_table() for name in ("frame", "stack")}
    frames = Frames(made)
    assert frames.holding_each(["work"])[0].tolist() == [False]
    none = pa.chunked_array([pa.array([], pa.uint64())])
    assert frames.functions(Interner(), none).dtype == np.int32
    naming = Interner()
    unknown = pa.chunked_array([pa.array([5, 6], pa.uint64())])
    assert [naming.names[it] for it in frames.functions(naming, unknown)] == ["", ""]
    assert frames.roles.activity.tolist() == [frames.roles.activity[0]]
