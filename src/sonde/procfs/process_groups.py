# SPDX-License-Identifier: Apache-2.0
"""The control groups of a process, and how much memory they leave it (cgroups(7), cgroup-v1,
cgroup-v2)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from sonde.procfs.files import read_file
from sonde.procfs.group_parties import group_mounts

NO_LIMIT: Final = 1 << 60
"""Version 1 of control groups writes a number near 2^63 where there is no limit."""
_MOUNTINFO: Final = Path("/proc/self/mountinfo")
_MEMORY: Final = ("v2", "memory")
_MAX_GROUP_BYTES: Final = 1 << 16


class MemoryLeft(NamedTuple):
    """Memory that a process may still take, by the control group that leaves it least."""

    bytes: int
    """Until the group's limit; 0 where it has reached that."""
    limit: int
    folder: str
    """Of the group."""


def mounts_by_controller(mountinfo: Path = _MOUNTINFO) -> dict[str, str]:
    """Where each controller's control groups are mounted. Raises OSError."""
    mounts: dict[str, str] = {}
    for point, controllers in group_mounts(mountinfo):
        for controller in controllers:
            mounts.setdefault(controller, point)
    return mounts


def groups_of(pid: int, mounts: Mapping[str, str] | None = None) -> list[str]:
    """Folders of the control groups of a process and of their parents, without the roots."""
    mounts = mounts_by_controller() if mounts is None else mounts
    raw = read_file(f"/proc/{pid}/cgroup", _MAX_GROUP_BYTES) or b""
    return folders_of(raw.decode("utf-8", "replace"), mounts)


def folders_of(cgroup: str, mounts: Mapping[str, str]) -> list[str]:
    """The same, by the content of /proc/PID/cgroup."""
    found: dict[str, None] = {}
    for line in cgroup.split("\n"):
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        mount = next((mounts[it] for it in (names or "v2").split(",") if it in mounts), "")
        parts = [part for part in path.split("/") if part and part != ".."]
        if mount:
            for depth in range(len(parts), 0, -1):
                found[f"{mount}/{'/'.join(parts[:depth])}"] = None
    return list(found)


def memory_of(folder: str) -> tuple[int, int]:
    """Bytes that a control group uses, and its limit; (0, 0) where it has none."""
    for limit, usage in (
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("memory.max", "memory.current"),
    ):
        most = number_in(f"{folder}/{limit}")
        if 0 < most < NO_LIMIT:
            return max(0, number_in(f"{folder}/{usage}")), most
    return 0, 0


def memory_left(pid: int, mounts: Mapping[str, str] | None = None) -> MemoryLeft | None:
    """How much memory the control groups of a process leave it, by the one that leaves least; None
    where none has a limit that can be read. The page cache counts as used, as it does in the
    kernel, which takes time to free it. Raises nothing."""
    try:
        mounts = mounts_by_controller() if mounts is None else mounts
    except OSError:
        return None
    mounts = {name: point for name, point in mounts.items() if name in _MEMORY}
    found = []
    # The roots, too: seen from a container, they are the container's groups.
    for folder in [*groups_of(pid, mounts), *mounts.values()]:
        usage, limit = memory_of(folder)
        if limit:
            found.append(MemoryLeft(max(0, limit - usage), limit, folder))
    return min(found, default=None)


def number_in(path: str) -> int:
    """The number that a file holds; -1: none, or it cannot be read."""
    word = (read_file(path) or b"").decode("utf-8", "replace").strip()
    return int(word) if word.lstrip("-").isdigit() else -1
