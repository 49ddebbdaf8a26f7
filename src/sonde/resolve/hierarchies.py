# SPDX-License-Identifier: Apache-2.0
"""Control groups by number: (hierarchy, inode of the group's directory) to its path.

The kernel numbers the groups of each hierarchy on its own; the number is the inode of the group's
directory where the hierarchy is mounted. Version 2 is hierarchy 0; those of version 1 have the
numbers that /proc/self/cgroup tells (cgroups(7)).
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sonde import procfs
from sonde.model.owner import GroupNote
from sonde.procfs.cgroup_paths import MAX_PATH, place_of
from sonde.resolve.recent import Recent

MAX_GROUPS: Final = 16_384
"""Those that root's services made, and as many below: the many groups that a user makes in one of
his own put nobody else's out."""
_RESCAN_S: Final = 5.0
"""After an unknown group, look again, at most this often."""
_CONTROLLERS: Final = frozenset({"memory", "freezer", "pids", "blkio"})
"""Those of version 1 that notes speak of."""


class Hierarchies:
    """Paths of the machine's control groups."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc
        self._paths: Recent[tuple[int, int], str] = Recent(MAX_GROUPS)
        self._delegated: Recent[tuple[int, int], str] = Recent(MAX_GROUPS)
        self._scanned_s = -_RESCAN_S

    def made(self, group: GroupNote) -> None:
        """The kernel told of a new one."""
        self._put((group.hierarchy, group.id), group.path)

    def path(self, hierarchy: int, number: int) -> str | None:
        """Its path under the root of the hierarchy, None where it is not known."""
        found = self._get((hierarchy, number))
        if found is None and time.monotonic() - self._scanned_s >= _RESCAN_S:
            self.scan()
            found = self._get((hierarchy, number))
        return found

    def scan(self) -> None:
        """Look at every group of the hierarchies that notes speak of."""
        self._scanned_s = time.monotonic()
        left = {False: MAX_GROUPS, True: MAX_GROUPS}
        for hierarchy, mount in self.mounts():
            for number, path, is_delegated in _groups(mount, left):
                kept = self._delegated if is_delegated else self._paths
                kept.put((hierarchy, number), path)

    def _get(self, key: tuple[int, int]) -> str | None:
        found = self._paths.get(key)
        return found if found is not None else self._delegated.get(key)

    def _put(self, key: tuple[int, int], path: str) -> None:
        (self._delegated if place_of(path).is_delegated else self._paths).put(key, path)

    def mounts(self) -> Iterator[tuple[int, str]]:
        """(hierarchy, where its root is mounted), version 2 first."""
        numbers = {}
        try:
            for line in procfs.read_lines(self._proc / "cgroup"):
                number, _, rest = line.partition(":")
                if not number:
                    continue
                for controller in rest.partition(":")[0].split(","):
                    numbers[controller] = int(number)
            mounted = list(procfs.group_mounts(self._proc / "mountinfo"))
        except (OSError, ValueError):
            return
        found: dict[int, str] = {}
        for point, controllers in mounted:
            if "v2" in controllers:
                found.setdefault(0, point)
            for controller in _CONTROLLERS & controllers:
                if controller in numbers:
                    found.setdefault(numbers[controller], point)
        yield from sorted(found.items())


def _groups(mount: str, left: dict[bool, int]) -> Iterator[tuple[int, str, bool]]:
    """(number, path, whether it is below a delegated one) of each group under a mount.

    Parents first, and level by level, those that were delegated last. `left`: how many more, of
    either kind.
    """
    try:
        yield os.stat(mount).st_ino, "/", False  # noqa: PTH116
    except OSError:
        return
    waiting = {False: deque([mount]), True: deque[str]()}
    while waiting[is_delegated := not waiting[False]]:
        try:
            with os.scandir(waiting[is_delegated].popleft()) as entries:
                for entry in entries:
                    if not entry.is_dir(follow_symlinks=False):
                        continue
                    path = procfs.printable(entry.path[len(mount) :])
                    below = is_delegated or place_of(path).is_delegated
                    if left[below] > 0:
                        left[below] -= 1
                        yield entry.inode(), path[:MAX_PATH], below
                        waiting[below].append(entry.path)
        except OSError:
            continue  # removed meanwhile
