# SPDX-License-Identifier: Apache-2.0
"""Which party (user or container) a control group belongs to.

A user can make groups, of any name, below one that they own; so can a container and a service. So
only what root decides counts: who owns the directories from the root down, and the names above the
border (`cgroup_paths`). From the top:

1. a directory that is not root's belongs to its user, and all below it;
2. a container's or a pod's group is that one's, and all below it, with directories of any owner;
3. else the user for whom root's services made it, the job, or the group at the border: a service.

A child looks at the directories (group_folders.py). Of one that does not answer the owner that was
seen last counts, else root.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from sonde.procfs.cgroup_paths import place_of
from sonde.procfs.group_folders import GROUPS, GroupFolders
from sonde.procfs.group_mounts import group_mounts
from sonde.procfs.names import raw_name
from sonde.procfs.parties import name_of, party_of_user

MACHINE: Final = ""
"""The party of what is not one group's."""
_KEPT_S: Final = 30.0
"""How long owners of directories are remembered: one may be given to a user after it was made."""
_MAX_KEPT: Final = 8_192
"""Directories."""
_SEARCHED: Final = frozenset({"v2", "cpu", "memory", "blkio", "freezer", "pids"})


class GroupParty(NamedTuple):
    """Whose a group is."""

    name: str
    has_all_below: bool
    """Groups below it are of the same party."""


def party_of_group(path: str, uid_of: Callable[[str], int]) -> GroupParty:
    """The party of a group by its path, as `names.text` makes it; `uid_of`: the owner of the
    directory of a path."""
    place = place_of(path)
    is_container = bool(place.container or place.pod_uid)
    at = ""
    for part in filter(None, path.split("/")):
        at += f"/{part}"
        if is_container and at == place.border:
            break
        if uid := uid_of(at):
            return GroupParty(name_of(party_of_user(uid)), True)
    if is_container:
        named = f"pod {place.pod_uid}" if place.pod_uid else f"container {place.container}"
        return GroupParty(named, True)
    if place.user:
        return GroupParty(name_of(party_of_user(int(place.user))), False)
    return GroupParty(f"job {place.job}" if place.job else place.border, False)


def payer_of_folder(folder: str, points: Iterable[str]) -> str:
    """The party that pays for waiting for a folder below one of these mount points, as far as its
    path alone shows that: nobody is asked."""
    path = next((folder[len(it) :] for it in points if folder.startswith(f"{it}/")), "")
    return party_of_group(path, lambda _: 0).name if path else MACHINE


class GroupParties:
    """Parties of groups by path, in any hierarchy, also of groups that are gone."""

    def __init__(
        self, mountinfo: Path = Path("/proc/self/mountinfo"), folders: GroupFolders = GROUPS
    ) -> None:
        self._mountinfo = mountinfo
        self._folders = folders
        self._points: list[str] = []
        self._uids: dict[str, int] = {}
        self._used: dict[str, None] = {}
        """Paths whose owners were asked for since these were looked at."""
        self._until_s = float("-inf")

    def of(self, path: str) -> str:
        """The name of the party; MACHINE for what is no path."""
        if not path.startswith("/"):
            return MACHINE
        now_s = time.monotonic()
        if now_s > self._until_s or len(self._uids) > _MAX_KEPT:
            self._until_s = now_s + _KEPT_S
            self._points = self._find()
            self._look_again()
        self._look([at for at in _prefixes(path) if at not in self._uids])
        return party_of_group(path, self._uid_of).name

    def _find(self) -> list[str]:
        try:
            mounts = list(group_mounts(self._mountinfo))
        except OSError:
            return []
        return [it.point for it in mounts if it.controllers & _SEARCHED]

    def _look_again(self) -> None:
        """Look at what was asked for of late, all at once, and forget the rest."""
        before, self._uids = self._uids, {}
        used, self._used = [*self._used][-_MAX_KEPT // 2 :], {}
        self._uids = {path: before[path] for path in used if path in before}
        self._look(used)

    def _look(self, paths: Sequence[str]) -> None:
        """Find out who owns the directories of these paths, in whichever hierarchy."""
        if not paths:
            return
        whose = {point + os.fsdecode(raw_name(it)): it for it in paths for point in self._points}
        found, _ = self._folders.look([*whose], lambda folder: self._payer_of(whose[folder]))
        uids: dict[str, int] = {}
        for path, there in zip(whose.values(), found, strict=True):
            if there is not None:
                uids[path] = uids.get(path) or there.uid
        for path in paths:
            self._uids[path] = uids.get(path, self._uids.get(path, 0))

    def _payer_of(self, path: str) -> str:
        return party_of_group(path, lambda at: self._uids.get(at, 0)).name

    def _uid_of(self, path: str) -> int:
        self._used[path] = None
        return self._uids.get(path, 0)


def _prefixes(path: str) -> list[str]:
    """The paths of a group and of those above it, outermost first."""
    found, at = [], ""
    for part in filter(None, path.split("/")):
        at += f"/{part}"
        found.append(at)
    return found
