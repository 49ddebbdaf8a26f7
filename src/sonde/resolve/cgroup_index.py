# SPDX-License-Identifier: Apache-2.0
"""Paths of control groups by (hierarchy, cgroup id).

The id is the inode of the group's directory below the mount of its hierarchy; ids of different
hierarchies overlap. Version 2 is hierarchy 0; hierarchies of version 1 have the numbers of
/proc/self/cgroup (cgroups(7)).
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sonde import procfs
from sonde.model.owner import GroupNote
from sonde.procfs.cgroup_paths import MAX_PATH, place_of
from sonde.resolve.lru_cache import LruCache

MAX_GROUPS: Final = 16_384
"""Groups kept outside delegated ones, and as many inside: groups that a user makes inside a
delegated group never evict those of others."""
MAX_OF_USER: Final = MAX_GROUPS // 4
"""Of a scan's groups inside delegated ones, of one user, container or service in one hierarchy."""
MAX_BELOW: Final = 2 * MAX_GROUPS
"""Groups right below one that are listed."""
_RESCAN_S: Final = 5.0
"""Shortest time between two scans because of unknown groups."""
_CONTROLLERS: Final = frozenset({"memory", "freezer", "pids", "blkio"})
"""Controllers of version 1 whose hierarchies appear in `ProcessNote`."""


class CgroupIndex:
    """Paths of the machine's control groups."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc
        self._paths: LruCache[tuple[int, int], str] = LruCache(MAX_GROUPS)
        """By (hierarchy, id): of groups outside delegated ones."""
        self._delegated: LruCache[tuple[int, int], str] = LruCache(MAX_GROUPS)
        """The same of groups inside delegated ones."""
        self._scanned_s = -_RESCAN_S
        self._scan: tuple[threading.Thread, list[tuple[int, int, str, bool]]] | None = None
        """A scan whose groups are not taken in yet, and these: hierarchy and what `_groups` has."""

    def add(self, group: GroupNote) -> None:
        """Record a group that the kernel reported as new."""
        self._take()
        self._put((group.hierarchy, group.id), group.path)

    def path(self, hierarchy: int, number: int) -> str | None:
        """The path below the root of the hierarchy, None for an unknown group."""
        found = self._get((hierarchy, number))
        if found is None and time.monotonic() - self._scanned_s >= _RESCAN_S:
            self.scan()
            found = self._get((hierarchy, number))
        return found

    def scan(self) -> None:
        """Read the groups of all hierarchies that `mounts` finds, as far as the bounds allow: in a
        thread, which waits for the child that reads them. A lookup waits for its end."""
        self._take()
        self._scanned_s = time.monotonic()
        found: list[tuple[int, int, str, bool]] = []
        thread = threading.Thread(
            target=self._find, args=(found,), name="sonde-groups", daemon=True
        )
        self._scan = thread, found
        thread.start()

    def _find(self, found: list[tuple[int, int, str, bool]]) -> None:
        mounts = list(self.mounts())
        left = {False: MAX_GROUPS, True: MAX_GROUPS}
        for done, (hierarchy, mount) in enumerate(mounts):
            # Even parts; what one hierarchy does not need is left for the next ones.
            budget = {inside: rest // (len(mounts) - done) for inside, rest in left.items()}
            left = {inside: rest - budget[inside] for inside, rest in left.items()}
            found += ((hierarchy, *group) for group in _groups(mount, budget))
            left = {inside: rest + budget[inside] for inside, rest in left.items()}

    def _take(self) -> None:
        """Take in the groups of the last scan."""
        if self._scan is None:
            return
        thread, found = self._scan
        thread.join()
        self._scan = None
        for hierarchy, number, path, is_delegated in found:
            paths = self._delegated if is_delegated else self._paths
            paths.put((hierarchy, number), path)

    def _get(self, key: tuple[int, int]) -> str | None:
        self._take()
        found = self._paths.get(key)
        return found if found is not None else self._delegated.get(key)

    def _put(self, key: tuple[int, int], path: str) -> None:
        (self._delegated if place_of(path).is_delegated else self._paths).put(key, path)

    def mounts(self) -> Iterator[tuple[int, str]]:
        """(hierarchy, mount point of its root) of the mounted hierarchies, version 2 first."""
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


def _groups(
    mount: str, budget: dict[bool, int], folders: procfs.GroupFolders = procfs.GROUPS
) -> Iterator[tuple[int, str, bool]]:
    """(id, path, whether it is inside a delegated group) of each group under a mount.

    Breadth first; groups inside delegated ones come last. `budget`: how many more to return, by
    whether they are inside a delegated group; it is counted down. A folder that does not answer is
    left out (`folders.hung`), with all below it.
    """
    of_user: Counter[str] = Counter()
    uids: dict[str, int] = {}
    """Owners of folders that are not root's, by path."""

    def party_of(folder: str) -> str:
        path = procfs.printable(folder[len(mount) :])
        return procfs.party_of_group(path, lambda at: uids.get(at, 0)).name

    (found,), _ = folders.look([mount], party_of)
    if found is None:
        return
    yield found.inode, "/", False
    waiting = {False: deque([(mount, "")]), True: deque[tuple[str, str]]()}
    while waiting[is_delegated := not waiting[False]]:
        asked = [waiting[is_delegated].popleft() for _ in range(len(waiting[is_delegated]))]
        read, _ = folders.look([folder for folder, _ in asked], party_of, most_below=MAX_BELOW)
        for (folder, above), there in zip(asked, read, strict=True):
            for below in there.below if there is not None else ():  # None: it was removed, or hangs
                path = f"{above}/{procfs.printable(below.name)}"
                if below.uid:
                    uids[path] = below.uid
                place = place_of(path)
                is_inside = is_delegated or place.is_delegated
                whose = place.user or place.border if is_inside else ""
                of_user[whose] += is_inside
                if budget[is_inside] > 0 and of_user[whose] <= MAX_OF_USER:
                    budget[is_inside] -= 1
                    yield below.inode, path[:MAX_PATH], is_inside
                    waiting[is_inside].append((f"{folder}/{below.name}", path))
