# SPDX-License-Identifier: Apache-2.0
"""The folder of cached unwind tables, which only root and the recorder's user can change.

The kernel unwinds all users' stacks with the tables in it, and root writes to it. A user who could
write there, or replace it by a link, would control both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from sonde.ownership import only_ours

SHARED: Final = Path("/var/cache")
_OURS: Final = Path("sonde/unwind")


def default_folder() -> Path | None:
    """/var/cache/sonde/unwind where we may write, else the user's cache folder; None if neither is
    private.

    Under sudo the environment may name a folder of the caller, which is not private for root.
    """
    for folder in _candidates():
        with suppress(OSError):
            if _make(folder) and os.access(folder, os.W_OK):
                return folder
    return None


def is_private(folder: Path) -> bool:
    """Whether only root and we can change the folder's content and where its path leads."""
    try:
        return folder.resolve(strict=True) == folder and only_ours(folder, {0, os.geteuid()})
    except OSError:
        return False


def _make(folder: Path) -> bool:
    """Create the folder; False where another user could redirect its path. Raises OSError."""
    if not is_private(next(it for it in (folder, *folder.parents) if it.exists())):
        return False
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        return False
    # Not listable: names are build ids, and resolve.build_id_links leads from those to paths.
    with suppress(PermissionError):  # it is root's, and we are not root
        folder.chmod(0o700)
    return True


def _candidates() -> Iterator[Path]:
    with suppress(OSError):
        yield SHARED.resolve(strict=True) / _OURS
    own = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):
        yield Path(own or Path.home() / ".cache") / _OURS
