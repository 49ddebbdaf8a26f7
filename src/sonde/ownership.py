# SPDX-License-Identifier: Apache-2.0
"""Who else could change what lies at a path: asked before root runs, loads or believes it."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Final

_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


@cache
def owners() -> frozenset[int]:
    """Users who decide what this process does anyway: root, its own user, and the owner of this
    very file, whose code is running."""
    return frozenset({0, os.geteuid(), Path(__file__).stat().st_uid})


def only_ours(path: Path, by: Collection[int] | None = None) -> bool:
    """Whether nobody but `by` (default: `owners`) can change what lies at `path`, or replace it.

    Every folder on the way counts, and every symbolic link. A folder with the sticky bit, like
    /tmp, may be on the way to what is ours, because nobody else can replace that there.
    """
    trusted = owners() if by is None else by
    literal = Path(os.path.abspath(path))  # noqa: PTH100 (links stay, to be looked at too)
    try:
        ways = {literal, literal.resolve(strict=True)}
        return all(_is_kept(way, trusted) for way in ways)
    except (OSError, RuntimeError):
        return False


def _is_kept(path: Path, trusted: Collection[int]) -> bool:
    """Raises OSError where a part of the path is not there."""
    for part in (path, *path.parents):
        found = part.lstat()
        if found.st_uid not in trusted:
            return False
        if stat.S_ISLNK(found.st_mode) or not found.st_mode & _WRITABLE_BY_OTHERS:
            continue
        by_group_root = not found.st_mode & stat.S_IWOTH and found.st_gid == 0
        on_the_way = part != path and bool(found.st_mode & stat.S_ISVTX)
        if not (by_group_root or on_the_way):
            return False
    return True


def trusted_folders(folders: Iterable[str]) -> list[str]:
    """Those of a search path that nobody else can put a file into.

    An empty or relative one means the working directory, which may be anybody's: never kept. For a
    user other than root, who endangers nobody else, absolute is enough.
    """
    absolute = [folder for folder in folders if folder.startswith("/")]
    if os.geteuid() != 0:
        return absolute
    return [folder for folder in absolute if only_ours(Path(folder))]
