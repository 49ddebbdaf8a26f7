# SPDX-License-Identifier: Apache-2.0
"""Which party a process belongs to: somebody who cannot make more of themselves.

What all share is divided between parties, so that none gets more of it by more processes, user ids
or namespaces. The kernel's side divides by the same rule (bpf/share.h), which it knows from
namespaces. Their files in /proc take a lock that a process can keep; `status` and `uid_map` take
none, so here the rule is:

1. a subordinate id belongs to the user who has it (/etc/subuid): one may have 65,536;
2. another id in a user namespace belongs to who began it: the user whose process the outermost one
   of that namespace descends from; where that is root, as for containers, the first id of its map;
3. in a pid namespace below the machine's and in no user namespace: that container, by the first
   process of its outermost one. Its processes may take any user id there is;
4. else the real user.

Of who has subordinate ids that /etc/subuid does not name, orphans in nested user namespaces count
by their own id.
"""

from __future__ import annotations

import os
import pwd
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

NOBODY: Final = -1
"""The party of a process that is gone, or of no process."""
UNKNOWN_PARTY: Final = -2
"""Of processes of which it is not known, or too far below the first one of their container: they
share what one party has."""

_SUBORDINATE: Final = Path("/etc/subuid")
_MAX_SUBORDINATE_BYTES: Final = 1 << 20
_MAX_STATUS_BYTES: Final = 1 << 20
"""65,536 groups, the most that a process can have, take 0.7 MB ahead of its pid namespaces."""
_FIRST_BYTES: Final = 8192
_MAX_CLIMB: Final = 64
_IDENTITY: Final = [b"0", b"0", b"4294967295"]
"""uid_map of the machine's own user namespace."""
_HAS_USER_NAMESPACES: Final = Path("/proc/self/uid_map").exists()


class _Seen(NamedTuple):
    uid: int
    parent: int
    levels: int
    """Pid namespaces that it is in; 0: that is not known."""
    is_first: bool
    """Of the innermost one."""


def party_of(pid: int) -> int:
    """The party of a process: a user's id, or for a container a negative number; NOBODY where the
    process is gone. Takes none of its locks."""
    seen = _see(pid)
    if seen is None:
        return NOBODY
    if seen.levels == 0:
        return UNKNOWN_PARTY
    mapped = _uid_map(pid)
    if mapped is None:
        return UNKNOWN_PARTY
    holder = _holders.of(seen.uid)
    if mapped != _IDENTITY:
        return holder if holder != seen.uid else _beginner_of(seen, mapped)
    return holder if seen.levels == 1 else _container_of(pid, seen)


def party_of_user(uid: int) -> int:
    """The party of what belongs to a user id of this machine."""
    return _holders.of(uid)


def name_of(party: int) -> str:
    """A party in words."""
    if party == NOBODY:
        return "nobody"
    if party == UNKNOWN_PARTY:
        return "processes of which it is not known whose they are"
    return f"user {party}" if party >= 0 else f"the container of process {-party}"


def _beginner_of(seen: _Seen, mapped: list[bytes]) -> int:
    """Who began the outermost user namespace of a process."""
    for _ in range(_MAX_CLIMB):
        above, around = _see(seen.parent), _uid_map(seen.parent)
        if above is not None and around is not None and around != _IDENTITY:
            seen, mapped = above, around
            continue
        if above is not None and above.uid:
            return _holders.of(above.uid)
        return _holders.of(int(mapped[1]) if len(mapped) > 1 else seen.uid)
    return UNKNOWN_PARTY


def _container_of(pid: int, seen: _Seen) -> int:
    """The number of the first process of the outermost pid namespace below the machine's, negated.
    Processes whose parents ended are that one's children."""
    for _ in range(_MAX_CLIMB):
        if seen.levels == 2 and seen.is_first:
            return -pid
        pid = seen.parent
        above = _see(pid) if pid else None
        if above is None or above.levels < 2:  # entered from outside, by setns()
            return UNKNOWN_PARTY
        seen = above
    return UNKNOWN_PARTY


def read_status(pid: int) -> bytes:
    """/proc/PID/status, whole; empty where the process is gone. Takes none of its locks."""
    with suppress(OSError), open(f"/proc/{pid}/status", "rb", buffering=0) as file:  # noqa: PTH123
        raw = file.read(_FIRST_BYTES)
        while len(raw) >= _FIRST_BYTES and len(raw) < _MAX_STATUS_BYTES:
            more = file.read(_MAX_STATUS_BYTES - len(raw))
            if not more:
                break
            raw += more
        return raw
    return b""


def _see(pid: int) -> _Seen | None:
    """What `status` has; the owner of /proc/PID may be root where the process is another's."""
    raw = read_status(pid)
    numbers = _line(raw, b"NSpid")
    with suppress(ValueError, IndexError):
        return _Seen(
            int(_line(raw, b"Uid")[0]),
            int(_line(raw, b"PPid")[0]),
            len(numbers),
            numbers[-1:] == [b"1"],
        )
    return None


def _line(raw: bytes, name: bytes) -> list[bytes]:
    return raw.partition(b"\n" + name + b":")[2].partition(b"\n")[0].split()


def _uid_map(pid: int) -> list[bytes] | None:
    """Of its user namespace, by triples: first id there, here, and how many; None: not known."""
    with suppress(OSError), open(f"/proc/{pid}/uid_map", "rb") as file:  # noqa: PTH123
        return file.read(256).split()
    return None if _HAS_USER_NAMESPACES else _IDENTITY


class _Holders:
    """Who has which subordinate ids, read again where the file changed."""

    def __init__(self) -> None:
        self._changed_ns = -1
        self._ranges: list[tuple[int, int, int]] = []
        """First id, number of ids, user."""

    def of(self, uid: int) -> int:
        """The user who has this id as a subordinate one, else the id itself."""
        try:
            changed_ns = _SUBORDINATE.stat().st_mtime_ns
        except OSError:
            return uid
        if changed_ns != self._changed_ns:
            self._ranges, self._changed_ns = _ranges(), changed_ns
        return next((who for first, n, who in self._ranges if first <= uid < first + n), uid)


def _ranges() -> list[tuple[int, int, int]]:
    try:
        with _SUBORDINATE.open("rb") as file:
            lines = os.fsdecode(file.read(_MAX_SUBORDINATE_BYTES)).split("\n")
    except OSError:
        return []
    found = []
    for line in lines:
        with suppress(KeyError, ValueError):
            name, first, count = line.strip().split(":")
            who = int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
            found.append((int(first), int(count), who))
    return found


_holders: Final = _Holders()
