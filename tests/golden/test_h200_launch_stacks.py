# SPDX-License-Identifier: Apache-2.0
"""Launches of running PyTorch, Triton and JAX loops on an H200, by uprobes: stacks lead through
libraries without frame pointers and the interpreter to the line of the program that asked.

Nothing was known of these libraries when the recordings began: in the first second their unwind
tables were still being made and loaded.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from sonde.query.capture import read

DATA = Path(__file__).parents[1] / "data"
TABLES_S = 1.0
LINES = {
    "torch": {("block", "torch_loop.py", line) for line in (6, 7, 8)},
    "triton": None,
    "jax": {("step", "jax_loop.py", 12)},
}


@pytest.fixture(scope="module", params=sorted(LINES))
def launches(request):
    """Program, and (frames leaf first, launches that it stands for, seconds in) of each stack."""
    tables = read(DATA / f"h200_{request.param}_launches.sonde").tables
    frames = {row["frame_id"]: row for row in tables["frame"].to_pylist()}
    stacks = {row["stack_id"]: row["frame_ids"] for row in tables["stack"].to_pylist()}
    rows = tables["sample"].to_pylist()
    began_ns = min(row["time_ns"] for row in rows)
    return request.param, [
        (
            [frames[it] for it in stacks.get(row["stack_id"], [])],
            row["weight_count"],
            (row["time_ns"] - began_ns) / 1e9,
        )
        for row in rows
        if row["kind"] == "device"
    ]


def reaches_the_module(frames):
    return any(it["kind"] == "python" and it["function"] == "<module>" for it in frames)


def test_launches_reach_the_programs_module(launches):
    _, stacks = launches
    count = Counter()
    for frames, weight, at_s in stacks:
        count[at_s > TABLES_S, reaches_the_module(frames)] += weight
    assert count[True, True] > 10_000
    assert count[True, False] <= 0.001 * count[True, True]
    cut = count[True, False] + count[False, False]
    assert cut <= 0.015 * sum(count.values())


def test_the_line_that_asked_is_named(launches):
    program, stacks = launches
    for frames, _, at_s in stacks:
        if at_s <= TABLES_S:
            continue
        lines = [(it["function"], it["file"].rpartition("/")[2], it["line"])
                 for it in frames if it["kind"] == "python"]  # fmt: skip
        assert lines[-1][:2] == ("<module>", f"{program}_loop.py")
        if LINES[program]:
            assert LINES[program] & set(lines)


def test_the_way_there_leads_through_all_layers(launches):
    program, stacks = launches
    through = {
        "torch": {"libtorch_cpu.so", "libtorch_python.so", "python3.12"},
        "triton": {"python3.12"},
        "jax": {"xla_cuda_plugin.so", "python3.12"},
    }[program]
    for frames, _, at_s in stacks:
        if at_s > TABLES_S:
            assert through <= {it["binary"] for it in frames}
            assert frames[-1]["function"] == "_start"
