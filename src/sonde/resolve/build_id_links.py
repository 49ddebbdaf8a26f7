# SPDX-License-Identifier: Apache-2.0
"""Symbolic links from build ids to the files that ran, on this machine alone.

A capture names a file by its build id and never by its path. `sonde report --lines` reads source
lines later, and finds the file by its link.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from contextlib import suppress
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
MAX_COMPARED: Final = 64 << 20
"""Bytes of two users' files that claim one build id, compared with one another."""
FOLDER_MODE: Final = 0o711
"""A user who knows a build id, from their capture, finds its file; only root can list them."""
_ANYBODY: Final = 65_534
"""Stands for the owner of a file on an image or a removable medium (the user id of nobody): who
made that chose the owners of its files."""
_BUILD_ID: Final = re.compile(r"[0-9a-f]{8,64}\Z")
_DISPUTED: Final = "/dev/null"
"""Target of a link where different files of two users claim one build id: root's, and no file. The
path of the one that came first follows it."""
_SECOND: Final = ".second"
"""Behind a build id: name of the link to the other file of a dispute."""
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
                self._link(build_id, path, _owner_of(opened.st_dev, opened.st_uid), pid)

    def _link(self, build_id: str, path: str, owner: int, pid: int | None) -> None:
        """Any user can make a file with any build id: so a user's file never replaces root's, and
        where different files of two users have the same one, neither is used until one is gone."""
        try:
            known = os.readlink(self._link_of(build_id))  # noqa: PTH115
        except OSError:
            self._make(build_id, path, owner)
            return
        if known.startswith(_DISPUTED):
            self._settle(build_id, known.removeprefix(_DISPUTED), path, owner)
            return
        if known == path:
            return
        try:
            device, _, uid = procfs.identity_of(known, pid)
        except OSError:  # gone
            self._make(build_id, path, owner)
            return
        known_owner = _owner_of(device, uid)
        if owner == 0 or owner == known_owner != _ANYBODY:
            self._make(build_id, path, owner)
        elif known_owner != 0 and not self._are_alike(known, path, owner):
            self._make(build_id + _SECOND, path, owner)
            self._make(build_id, _DISPUTED + known, known_owner)

    def _settle(self, build_id: str, first: str, path: str, owner: int) -> None:
        """A file of a disputed build id runs again: it counts where it is root's, or the other one
        is gone."""
        second = self._link_of(build_id + _SECOND)
        if owner != 0:
            others = [os.readlink(second), first]  # noqa: PTH115
            if path in others:
                others.remove(path)
            if any(_build_id_of(other) == build_id for other in others):
                return
        self._make(build_id, path, owner)
        with suppress(FileNotFoundError):
            os.unlink(second)  # noqa: PTH108

    def _link_of(self, name: str) -> str:
        """Where a link is. No Path: it interns each part, and users choose the build ids of theirs;
        on CPython 3.12 these would be kept for ever."""
        return f"{self._folder}/{name}"

    def _are_alike(self, known: str, path: str, owner: int) -> bool:
        """Whether two files have the same content; False where they cannot be compared. True, too,
        where the user has no allowance left, so that the known link stays."""
        if self._allowance.left(procfs.party_of_user(owner)) < 1:
            return True
        self._allowance.take(procfs.party_of_user(owner), 1)
        files = [procfs.open_stable(it, follow=True) for it in (known, path)]
        try:
            one, other = (it.fd for it in files if it is not None)
            sizes = os.fstat(one).st_size, os.fstat(other).st_size
            if sizes[0] != sizes[1] or sizes[0] > MAX_COMPARED:
                return False
            blocks = range(0, sizes[0], 1 << 20)
            return all(os.pread(one, 1 << 20, at) == os.pread(other, 1 << 20, at) for at in blocks)
        except (OSError, ValueError):
            return False
        finally:
            for file in files:
                if file is not None:
                    os.close(file.fd)

    def find(self, build_id: str) -> Path | None:
        """A readable file with that build id: the one that ran, else its separate debug file."""
        if not _BUILD_ID.match(build_id):
            return None
        link = self._folder / build_id
        debug = _DEBUG_FILES / build_id[:2] / f"{build_id[2:]}.debug"
        for path in (link, debug):
            with suppress(OSError):
                opened = procfs.open_stable(str(path), follow=True)
                if opened is None:
                    continue
                try:
                    if _native.build_id(f"/proc/self/fd/{opened.fd}") == build_id:
                        return path.readlink() if path.is_symlink() else path
                finally:
                    os.close(opened.fd)
        return None

    def _make(self, name: str, path: str, owner: int) -> None:
        """Make a link, or replace it. It belongs to the user whose file it leads to."""
        party = procfs.party_of_user(owner)
        if self._allowance.left(party) < 1:
            self.left_out += 1
            return
        self._allowance.take(party, 1)
        if not self._is_ready:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._folder.chmod(FOLDER_MODE)
        part = self._link_of(f"{name}.{os.getpid()}")
        os.symlink(path, part)  # noqa: PTH211
        with suppress(OSError):  # not root: there is one user here
            os.lchown(part, owner, -1)
        os.replace(part, self._link_of(name))  # noqa: PTH105
        self._made += 1
        if not self._is_ready or self._made >= SHRINK_EVERY:
            self._is_ready, self._made = True, 0
            self._shrink()

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


def _build_id_of(path: str) -> str:
    """The build id of a file that others may have put there; "" where there is none."""
    opened = procfs.open_stable(path, follow=True)
    if opened is None:
        return ""
    try:
        return _native.build_id(f"/proc/self/fd/{opened.fd}")
    except OSError:
        return ""
    finally:
        os.close(opened.fd)
