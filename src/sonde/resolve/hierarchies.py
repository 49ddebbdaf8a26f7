# SPDX-License-Identifier: Apache-2.0
"""Control groups by number: (hierarchy, inode of the group's directory) to its path.

The kernel numbers the groups of each hierarchy on its own; the number is the inode of the group's
directory where the hierarchy is mounted. Version 2 is hierarchy 0; those of version 1 have the
numbers that /proc/self/cgroup tells (cgroups(7)).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sonde.model.owner import GroupNote
from sonde.resolve.cgroup_paths import MAX_PATH
from sonde.resolve.recent import Recent

MAX_GROUPS: Final = 32_768
_RESCAN_S: Final = 5.0
"""After an unknown group, look again, at most this often."""
_CONTROLLERS: Final = frozenset({"memory", "freezer", "pids", "blkio"})
"""Those of version 1 that notes speak of."""


class Hierarchies:
    """Paths of the machine's control groups."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc
        self._paths: Recent[tuple[int, int], str] = Recent(MAX_GROUPS)
        self._scanned_s = -_RESCAN_S

    def made(self, group: GroupNote) -> None:
        """The kernel told of a new one."""
        self._paths.put((group.hierarchy, group.id), group.path)

    def path(self, hierarchy: int, number: int) -> str | None:
        """Its path under the root of the hierarchy, None where it is not known."""
        found = self._paths.get((hierarchy, number))
        if found is None and time.monotonic() - self._scanned_s >= _RESCAN_S:
            self.scan()
            found = self._paths.get((hierarchy, number))
        return found

    def scan(self) -> None:
        """Look at every group of the hierarchies that notes speak of."""
        self._scanned_s = time.monotonic()
        left = MAX_GROUPS
        for hierarchy, mount in self.mounts():
            for number, path in _groups(mount):
                self._paths.put((hierarchy, number), path)
                left -= 1
                if not left:
                    return

    def mounts(self) -> Iterator[tuple[int, str]]:
        """(hierarchy, where its root is mounted), version 2 first."""
        numbers = {}
        try:
            for line in (self._proc / "cgroup").read_text().splitlines():
                number, controllers, _ = line.split(":", 2)
                for controller in controllers.split(","):
                    numbers[controller] = int(number)
            mounted = (self._proc / "mountinfo").read_text().splitlines()
        except (OSError, ValueError):
            return
        found: dict[int, str] = {}
        for line in mounted:
            # proc_pid_mountinfo(5): id parent dev root point options … - type source options
            before, _, after = line.partition(" - ")
            words, kinds = before.split(" "), after.split(" ")
            if len(words) < 5 or len(kinds) < 3 or words[3] != "/":
                continue
            point = words[4].replace("\\040", " ")
            if kinds[0] == "cgroup2":
                found.setdefault(0, point)
            elif kinds[0] == "cgroup":
                for controller in _CONTROLLERS.intersection(kinds[2].split(",")):
                    if controller in numbers:
                        found.setdefault(numbers[controller], point)
        yield from sorted(found.items())


def _groups(mount: str) -> Iterator[tuple[int, str]]:
    """(number, path) of each group under a mount, parents first."""
    try:
        yield os.stat(mount).st_ino, "/"  # noqa: PTH116
    except OSError:
        return
    waiting = [mount]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                below = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            continue  # removed meanwhile
        for entry in below:
            path = entry.path[len(mount) :]
            yield entry.inode(), path[:MAX_PATH]
            waiting.append(entry.path)
