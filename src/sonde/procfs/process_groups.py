# SPDX-License-Identifier: Apache-2.0
"""The control groups of a process, and how much memory they leave it (cgroups(7), cgroup-v1,
cgroup-v2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from sonde.procfs.files import read_file
from sonde.procfs.group_mounts import group_mounts

MAX_LEVELS: Final = 16
"""Groups of one process in one hierarchy that are looked at. A user may nest them as deeply as a
path allows, some 2,000 levels. The outermost are kept, as root's services, container runtimes and
batch systems set limits there and none nests more than ten; and NEAREST_LEVELS of the process."""
NEAREST_LEVELS: Final = 4
"""Of MAX_LEVELS, those nearest to the process: what it was put into last."""
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
    """Folders of the control groups of a process and of their parents, without the roots; of each
    hierarchy at most MAX_LEVELS, innermost first."""
    return counted_groups_of(pid, mounts)[0]


def counted_groups_of(pid: int, mounts: Mapping[str, str] | None = None) -> tuple[list[str], int]:
    """The same, and how many more there are."""
    mounts = mounts_by_controller() if mounts is None else mounts
    raw = read_file(f"/proc/{pid}/cgroup", _MAX_GROUP_BYTES) or b""
    return folders_of(raw.decode("utf-8", "replace"), mounts)


def folders_of(cgroup: str, mounts: Mapping[str, str]) -> tuple[list[str], int]:
    """The same, by the content of /proc/PID/cgroup."""
    found: dict[str, None] = {}
    left_out = 0
    for line in cgroup.split("\n"):
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        mount = next((mounts[it] for it in (names or "v2").split(",") if it in mounts), "")
        parts = [part for part in path.split("/") if part and part != ".."]
        if not mount:
            continue
        depths: Sequence[int] = range(len(parts), 0, -1)
        if len(parts) > MAX_LEVELS:
            left_out += len(parts) - MAX_LEVELS
            depths = [*depths[:NEAREST_LEVELS], *depths[NEAREST_LEVELS - MAX_LEVELS :]]
        found.update((f"{mount}/{'/'.join(parts[:depth])}", None) for depth in depths)
    return list(found), left_out


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


def working_set_of(folder: str) -> tuple[int, int]:
    """Bytes of a control group that the kernel cannot take back at once, as Kubernetes counts them:
    without pages of files that were not used of late; and its limit. (0, 0) where it has none."""
    usage, limit = memory_of(folder)
    if not limit:
        return 0, 0
    stat = (read_file(f"{folder}/memory.stat") or b"").decode("utf-8", "replace")
    found = dict(line.partition(" ")[::2] for line in stat.split("\n"))
    # Version 1 has the group's own pages beside those of all groups below it.
    files = found.get("total_inactive_file") or found.get("inactive_file") or "0"
    return max(0, usage - (int(files) if files.isdecimal() else 0)), limit


def memory_left(pid: int, mounts: Mapping[str, str] | None = None) -> MemoryLeft | None:
    """How much memory the control groups of a process leave it, by the one that leaves least; None
    where none has a limit that can be read. The page cache counts as used, as it does in the
    kernel, which takes time to free it. Raises nothing."""
    return min(_limited(pid, mounts), default=None)


def memory_limit(pid: int, mounts: Mapping[str, str] | None = None) -> int:
    """The smallest limit of memory of a process's control groups; 0 where none has one that can be
    read. Raises nothing."""
    return min((it.limit for it in _limited(pid, mounts)), default=0)


def _limited(pid: int, mounts: Mapping[str, str] | None) -> list[MemoryLeft]:
    """The control groups of a process that have a limit of memory."""
    try:
        mounts = mounts_by_controller() if mounts is None else mounts
    except OSError:
        return []
    mounts = {name: point for name, point in mounts.items() if name in _MEMORY}
    found = []
    # The roots, too: seen from a container, they are the container's groups.
    for folder in [*groups_of(pid, mounts), *mounts.values()]:
        usage, limit = memory_of(folder)
        if limit:
            found.append(MemoryLeft(max(0, limit - usage), limit, folder))
    return found


def number_in(path: str) -> int:
    """The number that a file holds; -1: none, or it cannot be read."""
    word = (read_file(path) or b"").decode("utf-8", "replace").strip()
    return int(word) if word.lstrip("-").isdigit() else -1
