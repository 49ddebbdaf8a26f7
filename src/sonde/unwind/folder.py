# SPDX-License-Identifier: Apache-2.0
"""Where tables are kept: in a folder that nobody but us and root can write to, nor replace.

The kernel walks other people's stacks by what lies there, and root writes to it: whoever could
write there, or put a link in its place, would steer both.
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
    """Shared by the users of the machine where we may, else one's own; None where neither is safe.

    Under sudo the environment may name a folder of the caller, which is no place for root.
    """
    for folder in _candidates():
        with suppress(OSError):
            if _make(folder) and os.access(folder, os.W_OK):
                return folder
    return None


def is_private(folder: Path) -> bool:
    """Whether only root and we can change what lies in a folder, and what its path leads to."""
    try:
        return folder.resolve(strict=True) == folder and only_ours(folder, {0, os.geteuid()})
    except OSError:
        return False


def _make(folder: Path) -> bool:
    """Make a folder, unless somebody else could have it made elsewhere. Raises OSError."""
    if not is_private(next(it for it in (folder, *folder.parents) if it.exists())):
        return False
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        return False
    with suppress(PermissionError):  # root's, and we are not
        folder.chmod(0o700)  # names are build ids, by which resolve.seen_files knows a path
    return True


def _candidates() -> Iterator[Path]:
    with suppress(OSError):
        yield SHARED.resolve(strict=True) / _OURS
    own = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):
        yield Path(own or Path.home() / ".cache") / _OURS
