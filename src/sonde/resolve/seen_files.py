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

from sonde import _native

MAX_FILES: Final = 8_192
"""Links kept; the oldest go first."""
_BUILD_ID: Final = re.compile(r"[0-9a-f]{8,64}\Z")
_DEBUG_FILES: Final = Path("/usr/lib/debug/.build-id")


def default_folder() -> Path:
    """Where the links are kept: shared by the users of the machine where we may, else one's own.

    The folder may not be there yet.
    """
    shared = Path("/var/cache/sonde")
    if os.access(shared if shared.exists() else shared.parent, os.W_OK):
        return shared / "files"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sonde" / "files"


class SeenFiles:
    """Links by build id. A link that leads nowhere, or to another file by now, counts as none."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or default_folder()
        self._is_ready = False

    def note(self, build_id: str, path: str, opened: os.stat_result) -> None:
        """Remember that `path` led to a file, where it leads there for us too.

        `opened` tells which file it was. Failing is silent: reports then have no lines of it.
        """
        if not _BUILD_ID.match(build_id):
            return
        with suppress(OSError, ValueError):
            here = os.stat(path)  # noqa: PTH116
            if (here.st_dev, here.st_ino) == (opened.st_dev, opened.st_ino):
                self._link(build_id, path)

    def find(self, build_id: str) -> Path | None:
        """A file of that build id that can be read now: as it ran, else its debug file."""
        if not _BUILD_ID.match(build_id):
            return None
        link = self._folder / build_id
        debug = _DEBUG_FILES / build_id[:2] / f"{build_id[2:]}.debug"
        for path in (link, debug):
            with suppress(OSError):
                if path.is_file() and _native.build_id(str(path)) == build_id:
                    return path.resolve()
        return None

    def _link(self, build_id: str, path: str) -> None:
        link = self._folder / build_id
        with suppress(OSError):
            if os.readlink(link) == path:  # noqa: PTH115
                return
        if not self._is_ready:
            self._folder.mkdir(parents=True, exist_ok=True)
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
