# SPDX-License-Identifier: Apache-2.0
"""Symbolic links from build ids to the files that ran, on this machine alone.

A capture names a file by its build id and never by its path. `sonde report --lines` reads source
lines later, and finds the file by its link. A link to a user's file names the file's owner and
identity, too: a file that was changed or replaced since may have other debug data.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sonde import _native, procfs
from sonde.ownership import only_ours
from sonde.resolve.allowance import Allowance

MAX_FILES: Final = 8_192
"""Links kept; the oldest of the user who has most are removed first."""
SHRINK_EVERY: Final = 256
"""New links of this process, after which all are counted again: other recorders make some, too."""
LINKS_AT_ONCE: Final = 1_024
"""Links to files of one user that may be made at once; a training job maps some hundred files."""
LINKS_A_SECOND: Final = 1.0
"""How many more of them may be made each second."""
FOLDER_MODE: Final = 0o711
"""A user who knows a build id, from their capture, finds its file; only root can list them."""
_ANYBODY: Final = 65_534
"""Stands for the owner of a file on an image or a removable medium (the user id of nobody): who
made that chose the owners of its files."""
_BUILD_ID: Final = re.compile(r"[0-9a-f]{8,64}\Z")
_DISPUTED: Final = "/dev/null"
"""Target of a link where files of two users claim one build id: root's, and no file. The target for
the one that came first follows it."""
_SECOND: Final = ".second"
"""Behind a build id: name of the link to the other file of a dispute."""
_OWNED: Final = re.compile(r"@(\d+):(\d+):(\d+):(\d+):(/.*)", re.DOTALL)
"""Target for a user's file: its owner, device, inode, ctime in ns and path."""
_DEBUG_FILES: Final = Path("/usr/lib/debug/.build-id")


def default_folder() -> Path:
    """Where the links are kept: /var/cache where we may write, else the user's cache folder.

    The folder may not exist yet.
    """
    shared = Path("/var/cache/sonde")
    if os.access(shared if shared.exists() else shared.parent, os.W_OK):
        return shared / "files"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sonde" / "files"


def _is_private(folder: Path) -> bool:
    """Whether only root and we can write there; for a missing folder, where it will be made."""
    while not folder.exists():
        folder = folder.parent
    return only_ours(folder, {0, os.geteuid()})


class BuildIdLinks:
    """Links by build id. A link whose target is gone or has another build id by now is ignored."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or default_folder()
        self._is_private = _is_private(self._folder)
        """Else nothing is recorded: another user could have us write through a link of theirs."""
        self._made = 0
        """Links since they were counted last."""
        self._is_ready = False
        self._allowance = Allowance(LINKS_AT_ONCE, LINKS_A_SECOND)
        self.left_out = 0
        """Files without a link, as their user had too many new ones."""

    def record(
        self, build_id: str, path: str, opened: os.stat_result, pid: int | None = None
    ) -> None:
        """Link a build id to `path`, if `path` leads to the opened file for this process too.

        `opened`: status of the file. `pid`: the process that had it mapped. Errors are ignored:
        reports then have no source lines of the file.
        """
        if not (self._is_private and _BUILD_ID.match(build_id)):
            return
        with suppress(OSError, ValueError):
            # Another user may control where the path leads here.
            if procfs.identity_of(path, pid)[:2] == (opened.st_dev, opened.st_ino):
                self._link(build_id, _Claim.of(path, opened), pid)

    def _link(self, build_id: str, claim: _Claim, pid: int | None) -> None:
        """Any user can make a file with any build id: so a user's file never replaces root's, and
        where files of two users have the same one, neither is used until one is gone. Alike ones
        are no exception, as either user may change theirs when the other's was compared."""
        try:
            known = os.readlink(self._link_of(build_id))  # noqa: PTH115
        except OSError:
            self._make(build_id, claim.target, claim.owner)
            return
        if known.startswith(_DISPUTED):
            self._settle(build_id, known.removeprefix(_DISPUTED), claim)
            return
        before = _Claim.parsed(known)
        if before == claim:
            return
        is_same_user = claim.owner == before.owner != _ANYBODY
        is_gone = before.path == claim.path or not before.is_there(pid)
        if claim.owner == 0 or is_same_user or is_gone:
            self._make(build_id, claim.target, claim.owner)
        elif before.owner != 0:
            self._make(build_id + _SECOND, claim.target, claim.owner)
            if not self._make(build_id, _DISPUTED + known, before.owner):
                os.unlink(self._link_of(build_id))  # noqa: PTH108

    def _settle(self, build_id: str, first: str, claim: _Claim) -> None:
        """A file of a disputed build id runs again: it counts where it is root's, or the other one
        is gone."""
        second = self._link_of(build_id + _SECOND)
        if claim.owner != 0:
            targets = [first]
            with suppress(FileNotFoundError):
                targets.append(os.readlink(second))  # noqa: PTH115
            others = {_Claim.parsed(it).path for it in targets} - {claim.path}
            if any(_build_id_of(other) == build_id for other in others):
                return
        self._make(build_id, claim.target, claim.owner)
        with suppress(FileNotFoundError):
            os.unlink(second)  # noqa: PTH108

    def _link_of(self, name: str) -> str:
        """Where a link is. No Path: it interns each part, and users choose the build ids of theirs;
        on CPython 3.12 these would be kept for ever."""
        return f"{self._folder}/{name}"

    def find(self, build_id: str) -> Path | None:
        """A readable file with that build id: the one that ran, else its separate debug file."""
        if not _BUILD_ID.match(build_id):
            return None
        for claim, is_disputed in self._claims(build_id):
            if _build_id_of(claim.path, claim, is_disputed) == build_id:
                return Path(claim.path)
        debug = _DEBUG_FILES / build_id[:2] / f"{build_id[2:]}.debug"
        if _build_id_of(str(debug)) != build_id:
            return None
        return debug.readlink() if debug.is_symlink() else debug

    def _claims(self, build_id: str) -> Iterator[tuple[_Claim, bool]]:
        """Files that claim a build id, and whether they dispute it."""
        with suppress(OSError):
            target = os.readlink(self._link_of(build_id))  # noqa: PTH115
            is_disputed = target.startswith(_DISPUTED)
            yield _Claim.parsed(target.removeprefix(_DISPUTED)), is_disputed
            if is_disputed:
                second = os.readlink(self._link_of(build_id + _SECOND))  # noqa: PTH115
                yield _Claim.parsed(second), True

    def _make(self, name: str, target: str, owner: int) -> bool:
        """Make a link, or replace it. It belongs to the user whose file it leads to. Returns
        whether they may have one more."""
        party = procfs.party_of_user(owner)
        if self._allowance.left(party) < 1:
            self.left_out += 1
            return False
        self._allowance.take(party, 1)
        if not self._is_ready:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._folder.chmod(FOLDER_MODE)
        part = self._link_of(f"{name}.{os.getpid()}")
        os.symlink(target, part)  # noqa: PTH211
        with suppress(OSError):  # not root: there is one user here
            os.lchown(part, owner, -1)
        os.replace(part, self._link_of(name))  # noqa: PTH105
        self._made += 1
        if not self._is_ready or self._made >= SHRINK_EVERY:
            self._is_ready, self._made = True, 0
            self._shrink()
        return True

    def _shrink(self) -> None:
        """Remove links beyond MAX_FILES, each time the oldest of the party that has most."""
        links: dict[int, list[tuple[float, str]]] = defaultdict(list)
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    links[procfs.party_of_user(found.st_uid)].append((found.st_mtime, entry.path))
        for of_party in links.values():
            of_party.sort(reverse=True)
        for _ in range(sum(map(len, links.values())) - MAX_FILES):
            _, oldest = max(links.values(), key=len).pop()
            with suppress(FileNotFoundError):
                os.unlink(oldest)  # noqa: PTH108 (Path interns the name)


def _owner_of(device: int, uid: int) -> int:
    """Whose a file is that lies on a device and has this user id."""
    is_users = os.major(device) and not procfs.keeps_identity(device)
    return _ANYBODY if is_users else uid


def _build_id_of(path: str, claim: _Claim | None = None, is_disputed: bool = False) -> str:
    """The build id of a file that others may have put there; "" where there is none, or where the
    file is not to be believed: one that is neither root's nor ours has to be the one that ran."""
    opened = procfs.open_stable(path, follow=True)
    if opened is None:
        return ""
    try:
        if claim is not None and not claim.is_believed(os.fstat(opened.fd), is_disputed):
            return ""
        return _native.build_id(f"/proc/self/fd/{opened.fd}")
    except OSError:
        return ""
    finally:
        os.close(opened.fd)


@dataclass(frozen=True, slots=True)
class _Claim:
    """A file that has a build id, as it was when it ran."""

    path: str
    owner: int = 0
    identity: tuple[int, int, int] | None = None
    """Device, inode, ctime in ns; None of root's files, and of links that an earlier version
    made."""

    @classmethod
    def of(cls, path: str, opened: os.stat_result) -> _Claim:
        """Of an open file."""
        owner = _owner_of(opened.st_dev, opened.st_uid)
        return cls(path, owner, _identity_of(opened) if owner else None)

    @classmethod
    def parsed(cls, target: str) -> _Claim:
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

    def is_there(self, pid: int | None) -> bool:
        """Whether the path still leads to that file: of root's, to any of root's."""
        try:
            device, inode, uid = procfs.identity_of(self.path, pid)
        except OSError:
            return False
        if self.identity is not None and self.identity[:2] != (device, inode):
            return False
        return _owner_of(device, uid) == self.owner

    def is_believed(self, status: os.stat_result, is_disputed: bool) -> bool:
        """Whether to read debug data of the file that the path leads to now."""
        owner = _owner_of(status.st_dev, status.st_uid)
        if owner == os.geteuid() or (owner == 0 and not is_disputed):
            return True
        return not is_disputed and self.identity == _identity_of(status)


def _identity_of(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_ctime_ns
