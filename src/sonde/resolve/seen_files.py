# SPDX-License-Identifier: Apache-2.0
"""Where files with code were when they ran: a link for each build id, on this machine alone.

A capture names a file by its build id and never by its path. Source lines are read when a report is
made, and that is when the file must be found again.
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
"""Links kept; the oldest go first."""
FOLDER_MODE: Final = 0o711
"""A user who knows a build id, from their own capture, finds its file; only root can list them."""
_BUILD_ID: Final = re.compile(r"[0-9a-f]{8,64}\Z")
_DISPUTED: Final = "/dev/null"
"""Root's, and no file: what a link leads to where two users' files claim one build id."""
_DEBUG_FILES: Final = Path("/usr/lib/debug/.build-id")


def default_folder() -> Path:
    """Where the links are kept: the machine's cache where we may write, else the user's own.

    The folder may not be there yet.
    """
    shared = Path("/var/cache/sonde")
    if os.access(shared if shared.exists() else shared.parent, os.W_OK):
        return shared / "files"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sonde" / "files"


def _is_kept(folder: Path) -> bool:
    """Whether nobody else can write there, or where it is to be made."""
    while not folder.exists():
        folder = folder.parent
    return only_ours(folder, {0, os.geteuid()})


class SeenFiles:
    """Links by build id. A link that leads nowhere, or to another file by now, counts as none."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or default_folder()
        self._is_kept = _is_kept(self._folder)
        """Else nothing is noted: another user could have us write through a link of theirs."""
        self._is_ready = False

    def note(
        self, build_id: str, path: str, opened: os.stat_result, who: int | None = None
    ) -> None:
        """Remember that `path` led to a file, where it leads there for us too.

        `opened` tells which file it was, `who` which process had it mapped. Failing is silent:
        reports then have no lines of it.
        """
        if not (self._is_kept and _BUILD_ID.match(build_id)):
            return
        with suppress(OSError, ValueError):
            # Where the path leads, here, is somebody else's choice.
            if procfs.identity_of(path, who)[:2] == (opened.st_dev, opened.st_ino):
                self._link(build_id, self._agreed(build_id, path, opened.st_uid, who))

    def _agreed(self, build_id: str, path: str, owner: int, who: int | None) -> str:
        """What the link is to lead to. A build id is its maker's choice: a user's file never takes
        the place of root's, and where files of two users claim one, neither is believed."""
        link = self._folder / build_id
        try:
            known = os.readlink(link)  # noqa: PTH115
            known_owner = procfs.identity_of(str(link), who)[2]
        except OSError:
            return path
        if owner in (0, known_owner) and known != _DISPUTED:
            return path
        return path if owner == 0 else known if known_owner == 0 else _DISPUTED

    def find(self, build_id: str) -> Path | None:
        """A file of that build id that can be read now: as it ran, else its debug file."""
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
