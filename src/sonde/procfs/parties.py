# SPDX-License-Identifier: Apache-2.0
"""Which party (a user or a container) a process belongs to.

What all share is divided between parties, so that none gets more of it by more processes, user ids
or namespaces. The BPF programs divide by the same rule (bpf/party.h), as they can read namespaces.
/proc/PID/ns takes a lock that a process can keep; what ids.py reads, `uid_map` and `cgroup`
take none, so here it is found by those, where `in a user namespace` means: in another than the
machine's.

1. In no user namespace, in a pid namespace below the machine's: a container, whose processes may
   take any user id. It has the number of the first process of the outermost such pid namespace.
2. In no user namespace, in the machine's pid namespace: the real user; for a subordinate id, the
   user to whom /etc/subuid gives it (it may give 65,536 to one).
3. In a user namespace: the party, by rules 1 and 2, of the process that created it: the nearest
   ancestor in none. So a container's process that takes a user's id and then creates a user
   namespace stays that container's. Where root created it, and no pid namespace: the user of the
   process's id, or of the first id of its uid_map. An orphan's nearest ancestor is the process that
   adopted it (init, or a subreaper such as a user's systemd): where that is another user's, the
   user of the first id of its uid_map counts; without a map, that of its id. bpf/party.h reads
   whose the namespace is.
4. In a pid namespace below the machine's, where these rules find nobody (root created it with a
   user namespace, the process entered by setns(), or it is too deep): the party is that of all
   processes whose control group is of the same user, container or service, which neither a
   container nor a user chooses.

/etc/subuid is the machine's, also where Sonde runs in a container that may read the root directory
of process 1. For orphans in nested user namespaces with subordinate ids that it does not name, the
id itself is the party.
"""

from __future__ import annotations

import errno
import functools
import os
import pwd
from contextlib import suppress
from pathlib import Path
from typing import Final

from sonde.procfs import lookups
from sonde.procfs.cgroup_paths import place_of
from sonde.procfs.group_numbers import FIRST, GroupNumbers
from sonde.procfs.ids import Ids, ids_of
from sonde.procfs.names import text

NOBODY: Final = -1
"""The party of a process that is gone, or of no process."""
UNKNOWN_PARTY: Final = -2
"""The party of processes whose party cannot be found: together they may take what one may."""

_SUBORDINATE: Final = Path("/etc/subuid")
_PASSWD: Final = Path("/etc/passwd")
_FIRST: Final = Path("/proc/1")
"""The first process."""
_MAX_SUBORDINATE_BYTES: Final = 1 << 20
_IDS: Final = 1 << 32
"""User ids are below this."""
_MAX_CLIMB: Final = 64
"""Ancestors of a process that are followed."""
_MAX_CGROUP_BYTES: Final = 1 << 16
_IDENTITY: Final = [b"0", b"0", b"4294967295"]
"""uid_map of the machine's own user namespace."""


def party_of(pid: int) -> int:
    """The party of a process: a user's id, or for a container a negative number; NOBODY where the
    process is gone. Takes none of its locks."""
    seen = ids_of(pid)
    if seen is None:
        return NOBODY
    if seen.levels == 0:
        return UNKNOWN_PARTY
    try:
        mapped = _uid_map(pid)
    except OSError:  # it keeps its folder locked: in whose user namespace it is cannot be seen
        return _holders.of(seen.uid) if seen.levels == 1 else UNKNOWN_PARTY
    if mapped is None:
        return UNKNOWN_PARTY
    if mapped != _IDENTITY:
        return _creator_of(pid, seen, mapped)
    return _outside_user_namespaces(pid, seen)


def party_of_user(uid: int) -> int:
    """The party of what belongs to a user id of this machine."""
    return _holders.of(uid)


def subordinate_ids() -> list[tuple[int, int, int]]:
    """Ids that belong to another user: (first id, number of ids, user), a new list only where
    /etc/subuid has changed."""
    return _holders.ranges()


def name_of(party: int) -> str:
    """A party in words."""
    if party == NOBODY:
        return "nobody"
    if party == UNKNOWN_PARTY:
        return "processes of which it is not known whose they are"
    if party <= FIRST:
        return f"containers of {_groups.name_of(party) or 'a control group that is gone'}"
    return f"user {party}" if party >= 0 else f"the container of process {-party}"


def _outside_user_namespaces(pid: int, seen: Ids) -> int:
    """The party of a process that is in no user namespace (rules 1 and 2)."""
    return _holders.of(seen.uid) if seen.levels == 1 else _container_of(pid, seen)


def _creator_of(pid: int, seen: Ids, mapped: list[bytes]) -> int:
    """The party of the creator of a process's outermost user namespace (rule 3)."""
    first, at = seen, seen
    holder = _holders.of(first.uid)
    if first.levels == 1 and holder != first.uid:
        return holder
    for _ in range(_MAX_CLIMB):
        above = ids_of(at.parent)
        around = _uid_map_or_none(at.parent)
        if above is None or above.levels == 0 or around is None:
            break
        if around == _IDENTITY:
            if above.uid or above.levels > 1:
                adopter = _outside_user_namespaces(at.parent, above)
                if above.levels > 1 or adopter == holder:
                    return adopter
                return _of_orphan(pid, first, mapped, adopter)
            if first.levels > 1:  # perhaps a container's first process that has changed its id
                break
            return (_holders.of(int(mapped[1])) if len(mapped) > 1 else holder) or _group_of(pid)
        at, mapped = above, around
    return holder if first.levels == 1 and holder else _group_of(pid)


def _of_orphan(pid: int, first: Ids, mapped: list[bytes], above: int) -> int:
    """The party of a process in a user namespace that has another user's process above it, which
    may have adopted it: whose the first id of its uid_map is, where that is known. Without a map it
    can take no other id than that of its creator.

    Without a privilege one writes one's own id there, and none else. More ids are given to those
    whose subordinate ones they are, by a program that may know of others than /etc/subuid.
    """
    if len(mapped) < 3:
        creator = _holders.of(first.uid) if first.levels == 1 else 0
        return creator or above
    user = _holders.of(int(mapped[1]))
    is_known = mapped[2] == b"1" or user != int(mapped[1])
    if not is_known or user in (above, 0):
        return above
    # In a pid namespace below the machine's it may be a container's root who chose that id.
    return user if first.levels == 1 else _group_of(pid)


def _group_of(pid: int) -> int:
    """The party of a process by its control group (rule 4)."""
    for line in _read_groups(pid).split(b"\n"):
        _, _, raw = line.partition(b":")[2].partition(b":")
        place = place_of(text(raw))
        border = f"user {place.user}" if place.user else place.border
        if border.strip("/"):
            number = _groups.of(border)
            return UNKNOWN_PARTY if number is None else number
    return UNKNOWN_PARTY


def _read_groups(pid: int) -> bytes:
    with suppress(OSError):
        return lookups.read(f"/proc/{pid}/cgroup", _MAX_CGROUP_BYTES)
    return b""


def _container_of(pid: int, seen: Ids) -> int:
    """The pid of the first process of the outermost pid namespace below the machine's, negated. It
    is an ancestor of all others there: it adopts orphans."""
    first = pid
    for _ in range(_MAX_CLIMB):
        if seen.levels == 2 and seen.is_first:
            return -pid
        pid = seen.parent
        above = ids_of(pid) if pid else None
        if above is None or above.levels < 2:  # entered from outside, by setns()
            break
        seen = above
    return _group_of(first)


def _uid_map(pid: int) -> list[bytes] | None:
    """uid_map of its user namespace: (first id there, first id here, number of ids), in one list;
    None: not known. Raises OSError (ETIMEDOUT) where its folder is kept locked."""
    try:
        return lookups.read(f"/proc/{pid}/uid_map", 256).split()
    except OSError as error:
        if error.errno == errno.ETIMEDOUT:
            raise
    return None if _has_user_namespaces() else _IDENTITY


@functools.cache
def _has_user_namespaces() -> bool:
    return lookups.is_there("/proc/self/uid_map")


def _uid_map_or_none(pid: int) -> list[bytes] | None:
    with suppress(OSError):
        return _uid_map(pid)
    return None


class _Holders:
    """The users who have subordinate ids (/etc/subuid), read again when the file has changed."""

    def __init__(self) -> None:
        self._roots: list[Path | None] = []
        """The root of the first process, where that has other mounts than we, else None; empty
        until it is known."""
        self._changed_ns = -1
        self._ranges: list[tuple[int, int, int]] = []
        """First id, number of ids, user."""

    def of(self, uid: int) -> int:
        """The user who has this id as a subordinate one, else the id itself."""
        return next((who for first, n, who in self.ranges() if first <= uid < first + n), uid)

    def ranges(self) -> list[tuple[int, int, int]]:
        """The ranges as the file has them now: (first id, number of ids, user)."""
        root = self._root()
        try:
            fd = _open(root, _SUBORDINATE)
        except OSError:
            return []
        changed_ns = os.fstat(fd).st_mtime_ns
        os.close(fd)
        if changed_ns != self._changed_ns:
            self._ranges, self._changed_ns = _ranges(root), changed_ns
        return self._ranges

    def _root(self) -> Path | None:
        """The root directory of the first process, where that has other mounts than we, else None.
        None, too, as long as that process's folder is kept locked."""
        if not self._roots:
            try:
                is_other = _mounts_of(_FIRST) != _mounts_of(Path("/proc/self"))
            except OSError as error:
                if error.errno == errno.ETIMEDOUT:
                    return None
                is_other = False
            self._roots.append(_FIRST / "root" if is_other else None)
        return self._roots[0]


def _mounts_of(process: Path) -> str:
    """Which mount namespace a process is in. Raises OSError."""
    fd = lookups.open_file(f"{process}/ns/mnt", os.O_PATH | os.O_NOFOLLOW)
    try:
        return os.readlink("", dir_fd=fd)
    finally:
        os.close(fd)


def _lines_of(root: Path | None, path: Path) -> list[str]:
    try:
        with open(_open(root, path), "rb") as file:
            return os.fsdecode(file.read(_MAX_SUBORDINATE_BYTES)).split("\n")
    except OSError:
        return []


def _open(root: Path | None, path: Path) -> int:
    return lookups.open_file(f"{root or ''}{path}")


def _ranges(root: Path | None) -> list[tuple[int, int, int]]:
    users: dict[str, int] = {}
    if root is not None:  # user names of the machine's, then those of our container's image
        for line in _lines_of(root, _PASSWD):
            with suppress(ValueError, IndexError):
                users.setdefault(line.split(":")[0], int(line.split(":")[2]))
    found = []
    for line in _lines_of(root, _SUBORDINATE):
        with suppress(KeyError, ValueError):
            name, first, count = line.strip().split(":")
            if name.isdecimal():
                who = int(name)
            else:
                who = users[name] if name in users else pwd.getpwnam(name).pw_uid
            if 0 <= who < _IDS and 0 <= int(first) < _IDS and int(count) > 0:
                found.append((int(first), int(count), who))
    return found


_holders: Final = _Holders()
_groups: Final = GroupNumbers()
