# SPDX-License-Identifier: Apache-2.0
"""Whether other users could change the file at a path; checked before root runs or loads it."""

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
    """Trusted users: root, the user of this process, and the owner of this source file."""
    return frozenset({0, os.geteuid(), Path(__file__).stat().st_uid})


def only_ours(path: Path, by: Collection[int] | None = None) -> bool:
    """Whether only the users `by` (default: `owners`) can change or replace the file at `path`.

    Every parent folder and every symbolic link is checked. A parent may have the sticky bit, like
    /tmp: other users cannot replace trusted files there.
    """
    trusted = owners() if by is None else by
    literal = Path(os.path.abspath(path))  # noqa: PTH100 (links stay, to be checked too)
    try:
        paths = {literal, literal.resolve(strict=True)}
        return all(_is_protected(each, trusted) for each in paths)
    except (OSError, RuntimeError):
        return False


def _is_protected(path: Path, trusted: Collection[int]) -> bool:
    """Whether only trusted users can change each part. Raises OSError for a missing part."""
    for part in (path, *path.parents):
        found = part.lstat()
        if found.st_uid not in trusted:
            return False
        if stat.S_ISLNK(found.st_mode) or not found.st_mode & _WRITABLE_BY_OTHERS:
            continue
        by_group_root = not found.st_mode & stat.S_IWOTH and found.st_gid == 0
        is_sticky_parent = part != path and bool(found.st_mode & stat.S_ISVTX)
        if not (by_group_root or is_sticky_parent):
            return False
    return True


def trusted_folders(folders: Iterable[str]) -> list[str]:
    """The folders of a search path that other users cannot put files into.

    Relative folders are left out: they depend on the working directory, which may be any user's.
    For users other than root, who endanger nobody else, any absolute folder is accepted.
    """
    absolute = [folder for folder in folders if folder.startswith("/")]
    if os.geteuid() != 0:
        return absolute
    return [folder for folder in absolute if only_ours(Path(folder))]
