# SPDX-License-Identifier: Apache-2.0
"""Launches of a PyTorch loop on an H200, by uprobes: every stack leads through PyTorch's libraries,
which have no frame pointers, to the thread's entry."""

from __future__ import annotations

from pathlib import Path

import pytest

from sonde.query.capture import read

CAPTURE = Path(__file__).parents[1] / "data" / "h200_torch_launches.sonde"


@pytest.fixture(scope="module")
def launches():
    """(frames leaf first, whether whole) of each sampled launch."""
    tables = read(CAPTURE).tables
    frames = {row["frame_id"]: row for row in tables["frame"].to_pylist()}
    stacks = {row["stack_id"]: row for row in tables["stack"].to_pylist()}
    samples = [row for row in tables["sample"].to_pylist() if row["kind"] == "device"]
    assert len(samples) > 40
    return [
        ([frames[it] for it in stacks[row["stack_id"]]["frame_ids"]], stacks[row["stack_id"]])
        for row in samples
        if row["stack_id"]
    ]


def test_every_launch_reaches_the_entry(launches):
    assert all(stack["complete"] for _, stack in launches)
    assert all(frames[-1]["function"] == "_start" for frames, _ in launches)


def test_the_way_there_leads_through_all_layers(launches):
    for frames, _ in launches:
        binaries = {frame["binary"] for frame in frames}
        assert {"libtorch_cpu.so", "libtorch_python.so", "python3.12"} <= binaries
