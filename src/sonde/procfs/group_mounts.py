# SPDX-License-Identifier: Apache-2.0
"""Where the hierarchies of control groups are mounted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class GroupMount(NamedTuple):
    """The root of a hierarchy."""

    point: str
    controllers: frozenset[str]
    """"v2" for the hierarchy of version 2."""


def group_mounts(mountinfo: Path = Path("/proc/self/mountinfo")) -> Iterator[GroupMount]:
    """Where whole hierarchies of control groups are mounted. Raises OSError."""
    # As files.read_lines does; that asks the broker, which asks by parties, which asks here.
    for line in mountinfo.read_bytes().decode("utf-8", "replace").split("\n"):
        # proc_pid_mountinfo(5): id parent dev root point options … - type source options
        before, _, after = line.partition(" - ")
        words, kinds = before.split(" "), after.split(" ")
        if len(words) < 5 or len(kinds) < 3 or words[3] != "/":
            continue
        point = words[4].replace("\\040", " ")
        if kinds[0] == "cgroup2":
            yield GroupMount(point, frozenset({"v2"}))
        elif kinds[0] == "cgroup":
            yield GroupMount(point, frozenset(kinds[2].split(",")))
