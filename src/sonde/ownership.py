# SPDX-License-Identifier: Apache-2.0
"""Whether other users could change the file at a path; checked before root runs or loads it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import Final

_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
_MAX_LINKS: Final = 40
"""Symbolic links in one path that Linux follows."""


@cache
def owners() -> frozenset[int]:
    """Trusted users: root, the user of this process, and the owner of this source file."""
    return frozenset({0, os.geteuid(), Path(__file__).stat().st_uid})


def only_ours(path: Path, trusted: Collection[int] | None = None) -> bool:
    """Whether only `trusted` users (default: `owners`) can change or replace the file at `path`.

    False, too, where it cannot be found out.

    Every folder and every symbolic link on the way to it is checked, also links that links lead to.
    A parent may have the sticky bit, like /tmp: other users cannot replace trusted files there.
    """
    users = owners() if trusted is None else trusted
    try:
        passed, file = _way_to(path.absolute())
        return all(_is_protected(part, users, part != file) for part in passed)
    except OSError:
        return False


def _way_to(path: Path) -> tuple[set[Path], Path]:
    """(every folder, link and file that a look-up of an absolute path passes; where it ends).

    In each, only the last component may be a link. Raises OSError for a missing part, or too many
    links.
    """
    at = Path("/")
    passed = {at}
    links = 0
    ahead = [*reversed(path.parts[1:])]
    while ahead:
        name = ahead.pop()
        if name == "..":
            at = at.parent
            continue
        part = at / name
        passed.add(part)
        if not stat.S_ISLNK(part.lstat().st_mode):
            at = part
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = part.readlink()
        if target.is_absolute():
            at = Path("/")
        ahead += reversed([name for name in target.parts if name != target.root])
    return passed, at


def _is_protected(part: Path, trusted: Collection[int], is_parent: bool) -> bool:
    """Whether only trusted users can change it; `is_parent`: whether others cannot exchange what
    trusted users have in it. Raises OSError where it is missing."""
    found = part.lstat()
    if found.st_uid not in trusted:
        return False
    if stat.S_ISLNK(found.st_mode) or not found.st_mode & _WRITABLE_BY_OTHERS:
        return True
    by_group_root = not found.st_mode & stat.S_IWOTH and found.st_gid == 0
    return by_group_root or (is_parent and bool(found.st_mode & stat.S_ISVTX))


def trusted_folders(folders: Iterable[str]) -> list[str]:
    """The folders of a search path that other users cannot put files into.

    Relative folders are left out: they depend on the working directory, which may be any user's.
    Of a process of another user than root every absolute folder is accepted: it endangers nobody
    else.
    """
    absolute = [folder for folder in folders if folder.startswith("/")]
    if os.geteuid() != 0:
        return absolute
    return [folder for folder in absolute if only_ours(Path(folder))]
