# SPDX-License-Identifier: Apache-2.0
"""Symbolic links from build ids to the files that ran, on this machine alone.

A capture names a file by its build id and never by its path. `sonde report --lines` reads source
lines later, and finds the file by its link.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from sonde import _native, procfs
from sonde.ownership import only_ours

MAX_FILES: Final = 8_192
"""Links kept; the oldest are removed first."""
FOLDER_MODE: Final = 0o711
"""A user who knows a build id, from their capture, finds its file; only root can list them."""
_BUILD_ID: Final = re.compile(r"[0-9a-f]{8,64}\Z")
_DISPUTED: Final = "/dev/null"
"""Target of a link where files of two users claim one build id: root's, and no file."""
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
        self._is_ready = False

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
                self._link(build_id, self._target(build_id, path, opened.st_uid, pid))

    def _target(self, build_id: str, path: str, owner: int, pid: int | None) -> str:
        """The target of a link. Any user can make a file with any build id: so a user's file never
        replaces root's, and where files of two users have the same one, neither is used."""
        link = self._folder / build_id
        try:
            known = os.readlink(link)  # noqa: PTH115
            known_owner = procfs.identity_of(str(link), pid)[2]
        except OSError:
            return path
        if owner in (0, known_owner) and known != _DISPUTED:
            return path
        return path if owner == 0 else known if known_owner == 0 else _DISPUTED

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

    def _link(self, build_id: str, path: str) -> None:
        link = self._folder / build_id
        with suppress(OSError):
            if os.readlink(link) == path:  # noqa: PTH115
                return
        if not self._is_ready:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._folder.chmod(FOLDER_MODE)
            self._shrink()
            self._is_ready = True
        part = self._folder / f"{build_id}.{os.getpid()}"
        part.symlink_to(path)
        part.replace(link)

    def _shrink(self) -> None:
        links = list(self._folder.iterdir())
        if len(links) > MAX_FILES:
            links.sort(key=lambda it: it.lstat().st_mtime)
            for link in links[: len(links) - MAX_FILES]:
                link.unlink(missing_ok=True)
