# SPDX-License-Identifier: Apache-2.0
"""Launches of running PyTorch, Triton and JAX loops on an H200, by uprobes: stacks lead through
libraries without frame pointers and the interpreter to the line of the program that asked.

Nothing was known of these libraries before: their unwind tables were made, and loaded page by page,
before the recordings began (sonde.agent.warm_up).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from sonde.query.capture import read

DATA = Path(__file__).parents[1] / "data"
LINES = {
    "torch": {("block", "torch_loop.py", line) for line in (6, 7, 8)},
    "triton": None,
    "jax": {("step", "jax_loop.py", 12)},
}


@pytest.fixture(scope="module", params=sorted(LINES))
def launches(request):
    """Program, and (frames leaf first, launches that it stands for) of each stack."""
    tables = read(DATA / f"h200_{request.param}_launches.sonde").tables
    frames = {row["frame_id"]: row for row in tables["frame"].to_pylist()}
    stacks = {row["stack_id"]: row["frame_ids"] for row in tables["stack"].to_pylist()}
    return request.param, [
        ([frames[it] for it in stacks.get(row["stack_id"], [])], row["weight_count"])
        for row in tables["sample"].to_pylist()
        if row["kind"] == "device"
    ]


def reaches_the_module(frames):
    return any(it["kind"] == "python" and it["function"] == "<module>" for it in frames)


def test_launches_reach_the_programs_module(launches):
    _, stacks = launches
    count = Counter()
    for frames, weight in stacks:
        count[reaches_the_module(frames)] += weight
    assert count[True] > 7_500
    assert count[False] <= 0.001 * count[True]


def test_the_line_that_asked_is_named(launches):
    program, stacks = launches
    for frames, _ in stacks:
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
    for frames, _ in stacks:
        assert through <= {it["binary"] for it in frames}
        assert frames[-1]["function"] == "_start"
