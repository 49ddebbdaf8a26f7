# SPDX-License-Identifier: Apache-2.0
"""How much memory the control groups of a process leave it."""

from __future__ import annotations

import os

import pytest

from sonde import procfs


def groups(root, version, *limits):
    """Control groups, one in the other, as (limit, usage) from the top down; the innermost path."""
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes")}.get(
        version, ("memory.max", "memory.current")
    )
    folder = root
    for number, words in enumerate(limits):
        folder = folder / f"g{number}"
        folder.mkdir(parents=True)
        for name, word in zip(names, words, strict=True):
            (folder / name).write_text(f"{word}\n")
    return "/" + str(folder.relative_to(root))


@pytest.mark.parametrize(
    ("version", "limits", "left"),
    [
        (2, [("max", 5)], None),
        (2, [("2000000000", 1_600_000_000)], 400_000_000),
        (2, [("1000000000", 700_000_000), ("max", 1)], 300_000_000),  # an ancestor's
        (2, [("1000000000", 100_000_000), ("600000000", 700_000_000)], 0),
        (1, [(9223372036854771712, 5)], None),
        (1, [("2000000000", 1_600_000_000), (9223372036854771712, 5)], 400_000_000),
    ],
)
def test_memory_that_control_groups_leave(monkeypatch, tmp_path, version, limits, left):
    path = groups(tmp_path, version, *limits)
    line = f"4:memory:{path}\n" if version == 1 else f"0::{path}\n"
    read = procfs.read_file
    own = f"/proc/{os.getpid()}/cgroup"
    monkeypatch.setattr(
        "sonde.procfs.process_groups.read_file",
        lambda name, *most: line.encode() if name == own else read(name, *most),
    )
    mounts = {"memory" if version == 1 else "v2": str(tmp_path)}
    found = procfs.memory_left(os.getpid(), mounts)
    assert (found.bytes if found else None) == left
