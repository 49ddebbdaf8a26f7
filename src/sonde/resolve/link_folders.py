# SPDX-License-Identifier: Apache-2.0
"""Where links by build id are kept, by who may know of them.

Build ids of distributed programs are public, and of a name in a folder everybody who may search the
folder learns that it is there, whose it is and since when, by stat(): no mode or owner of a link or
file hides that. So three folders keep the links, all of them root's, in which nobody but root can
write:

- `public`, which everybody may search and only root can list: files that every user of the machine
  can reach and read, as long as they are in no dispute.
- `private`, for root alone: all other files, and the marks of disputes (dispute_marks.py), which
  have user ids in them.
- `users/UID`, of which that user may look names up: copies of those links in `private` that lead to
  files of theirs. An ACL allows it, as a folder of the user's could be changed by them, and groups
  may have more members. Where the file system has no ACLs, they have no copies. Neither do files of
  images and removable media, whose owners are chosen by who made these.

So whatever root reads here, root wrote. A recorder without root has all its links in `private`.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from sonde.resolve.claims import ANYBODY, Claim
from sonde.resolve.dispute_marks import put_link

SEARCHABLE: Final = 0o711
"""Everybody can look a name up that they know; only root can list them."""
_ACL: Final = "system.posix_acl_access"
_ACL_VERSION: Final = struct.Struct("<I")
_ACL_ENTRY: Final = struct.Struct("<HHI")
"""Kind, permissions and id of one (linux/posix_acl_xattr.h)."""
_NO_ID: Final = 0xFFFF_FFFF
_OWNER, _USER, _GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x10, 0x20


class Entry(NamedTuple):
    """A link or mark in one of the folders."""

    name: str
    uid: int
    """Whose it is."""
    time_s: float
    """Since when (Unix time)."""


class LinkFolders:
    """Links to claimed files, by name. No Path names them: it interns each part, and users choose
    the build ids of theirs; on CPython 3.12 these would be kept for ever."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.private = top / "private"
        self._public, self._users = f"{top}/public", f"{top}/users"
        self._is_made = False

    def make(self) -> None:
        """Make the folders; what an earlier version left in `top`, where everybody could look it
        up, is root's alone until it is recorded again. Raises OSError."""
        if self._is_made:
            return
        _make(f"{self.top}", SEARCHABLE)
        _make(f"{self.private}", 0o700)
        _make(self._public, SEARCHABLE)
        _make(self._users, SEARCHABLE)
        with os.scandir(self.top) as entries:
            for entry in entries:
                if entry.is_symlink():
                    with suppress(FileNotFoundError):  # another recorder was quicker
                        _move(entry.path, f"{self.private}/{entry.name}")
        self._is_made = True

    def held(self, name: str) -> Claim | None:
        """What a link leads to that we made."""
        return _claim(f"{self.private}/{name}") or _claim(f"{self._public}/{name}")

    def for_us(self, name: str) -> Iterator[Claim]:
        """What the links lead to that we may read."""
        ours = f"{self._users}/{os.geteuid()}"
        yield from filter(None, (_claim(f"{it}/{name}") for it in (self.private, ours)))
        if (found := _claim(f"{self._public}/{name}")) is not None:
            yield found

    def put(self, name: str, claim: Claim, is_public: bool) -> None:
        """Make a link, or replace it. It belongs to the user whose file it leads to. Raises
        OSError."""
        self._drop_copy(name)
        private, public = f"{self.private}/{name}", f"{self._public}/{name}"
        put_link(public if is_public else private, claim.target, claim.owner)
        _unlink(private if is_public else public)
        if not is_public:
            self._copy(name, claim)

    def publish(self, name: str) -> None:
        """Have everybody read a link that is held. Raises OSError."""
        self._drop_copy(name)
        with suppress(FileNotFoundError):  # it is public
            os.rename(f"{self.private}/{name}", f"{self._public}/{name}")  # noqa: PTH104

    def hide(self, name: str) -> None:
        """Have only root and the file's owner read a link that is held. Raises OSError."""
        private = f"{self.private}/{name}"
        with suppress(FileNotFoundError):  # it is private
            _move(f"{self._public}/{name}", private)
        if (claim := _claim(private)) is not None:
            self._copy(name, claim)

    def drop(self, name: str) -> None:
        """Remove a link. Raises OSError."""
        self._drop_copy(name)
        for folder in (self._public, self.private):
            _unlink(f"{folder}/{name}")

    def entries(self) -> Iterator[Entry]:
        """All links that are no copies, and the marks, in no order. Raises OSError."""
        for folder in (self._public, str(self.private)):
            with os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(OSError):
                        found = entry.stat(follow_symlinks=False)
                        yield Entry(entry.name, found.st_uid, found.st_mtime)

    def drop_stale_copies(self) -> None:
        """Remove copies of links that are gone, as after a recorder was killed, and folders of
        users without any. Raises OSError."""
        with os.scandir(self._users) as folders:
            for folder in folders:
                with suppress(OSError):
                    for name in os.listdir(folder.path):  # noqa: PTH208
                        if not os.path.lexists(f"{self.private}/{name}"):
                            os.unlink(f"{folder.path}/{name}")  # noqa: PTH108
                    os.rmdir(folder.path)  # noqa: PTH106

    def _copy(self, name: str, claim: Claim) -> None:
        """Have a file's owner read its link, where that is possible."""
        if os.geteuid() != 0 or claim.owner in (0, ANYBODY):
            return
        folder = f"{self._users}/{claim.owner}"
        if _claim(f"{folder}/{name}") == claim:
            return
        with suppress(OSError):
            with suppress(FileExistsError):
                os.mkdir(folder, 0o700)  # noqa: PTH102
            _let_search(folder, claim.owner)
            put_link(f"{folder}/{name}", claim.target)

    def _drop_copy(self, name: str) -> None:
        claim = _claim(f"{self.private}/{name}")
        if claim is not None and claim.owner:
            _unlink(f"{self._users}/{claim.owner}/{name}")


def _make(folder: str, mode: int) -> None:
    """Make a folder with this mode; of one that is there, take away what is beyond that. Raises
    OSError."""
    try:
        os.makedirs(folder)  # noqa: PTH103
    except FileExistsError:
        mode &= stat.S_IMODE(os.stat(folder).st_mode)  # noqa: PTH116
    os.chmod(folder, mode)  # noqa: PTH101


def _claim(link: str) -> Claim | None:
    try:
        return Claim.parsed(os.readlink(link))  # noqa: PTH115
    except OSError:
        return None


def _move(link: str, to: str) -> None:
    """Give a link another name; where there is one by that name, remove the first instead. Raises
    OSError."""
    if os.path.lexists(to):
        os.unlink(link)  # noqa: PTH108
    else:
        os.rename(link, to)  # noqa: PTH104


def _unlink(link: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(link)  # noqa: PTH108


def _let_search(folder: str, uid: int) -> None:
    """Let a user look names up in a folder of ours, and nobody else. Raises OSError."""
    entries = ((_OWNER, 7, _NO_ID), (_USER, 1, uid), (_GROUP, 0, _NO_ID), (_MASK, 1, _NO_ID))
    acl = b"".join(_ACL_ENTRY.pack(*it) for it in (*entries, (_OTHERS, 0, _NO_ID)))
    os.setxattr(folder, _ACL, _ACL_VERSION.pack(2) + acl, follow_symlinks=False)
