# SPDX-License-Identifier: Apache-2.0
"""A file that has a build id, as it was when it ran, and as the target of a link has it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

from sonde import procfs

ANYBODY: Final = 65_534
"""Stands for the owner of a file on an image or a removable medium (the user id of nobody): who
made that chose the owners of its files."""
_OWNED: Final = re.compile(r"@(\d+):(\d+):(\d+):(\d+):(/.*)", re.DOTALL)
"""Target for a user's file: its owner, device, inode, ctime in ns and path."""
_MAX_TARGET: Final = 1_023
"""Bytes of a link's target, on XFS; other file systems hold 4,095."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A path that leads to a file with a build id, and whose that is."""

    path: str
    owner: int = 0
    identity: tuple[int, int, int] | None = None
    """Device, inode, ctime in ns; None of root's files, and of links that an earlier version
    made."""

    @classmethod
    def of(cls, path: str, opened: os.stat_result) -> Claim:
        """Of an open file."""
        owner = _owner_of(opened.st_dev, opened.st_uid)
        return cls(path, owner, _identity_of(opened) if owner else None)

    @classmethod
    def parsed(cls, target: str) -> Claim:
        """Of a link's target."""
        found = _OWNED.fullmatch(target)
        if found is None:
            return cls(target)
        owner, device, inode, ctime_ns = map(int, found.groups()[:4])
        return cls(found[5], owner, (device, inode, ctime_ns))

    @property
    def target(self) -> str:
        """Of the link."""
        if self.identity is None:
            return self.path
        return f"@{self.owner}:{':'.join(map(str, self.identity))}:{self.path}"

    @property
    def fits(self) -> bool:
        """Whether a link can hold it on every file system."""
        return len(os.fsencode(self.target)) <= _MAX_TARGET

    def is_of_same(self, claim: Claim) -> bool:
        """Whether another one takes the place of this one: it is the same user's, or has the path
        by now."""
        return self.path == claim.path or claim.owner == self.owner != ANYBODY

    def is_there(self, pid: int | None) -> bool:
        """Whether the path still leads to that file: of root's, to any of root's. True, too, where
        it cannot be found out: `pid` may be a process that has readers wait."""
        try:
            device, inode, uid = procfs.identity_of(self.path, pid)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        if self.identity is not None and self.identity[:2] != (device, inode):
            return False
        return _owner_of(device, uid) == self.owner

    def is_believed(self, status: os.stat_result, is_disputed: bool) -> bool:
        """Whether to read debug data of the file that the path leads to now."""
        owner = _owner_of(status.st_dev, status.st_uid)
        if owner == os.geteuid() or (owner == 0 and (self.owner == 0 or not is_disputed)):
            return True
        return not is_disputed and self.identity == _identity_of(status)


def _owner_of(device: int, uid: int) -> int:
    """Whose a file is that lies on a device and has this user id."""
    is_users = os.major(device) and not procfs.keeps_identity(device)
    return ANYBODY if is_users else uid


def _identity_of(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_ctime_ns
