# SPDX-License-Identifier: Apache-2.0
"""Marks of build ids that files of several users claim, beside the links of `build_id_links`.

A mark is root's, for root alone to read, has a target of a few bytes, and is no part of what links
a user may have: nobody who claims a build id can avoid it by a long path, or push it out by links
of theirs.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from sonde.resolve.allowance import Allowance

MAX_MARKS: Final = 32_768
"""Marks kept. None makes room for another one: where there are as many, users have no new links."""
MARKS_AT_ONCE: Final = 1_024
"""Marks that one user or container may cause at once; a large image has some hundred files."""
MARKS_A_SECOND: Final = 1 / 600
"""How many more of them each second: one alone needs seven months to fill all."""
SUFFIX: Final = ".disputed"
"""Behind a build id: name of its mark."""
OF_ALL: Final = "/dev/null"
"""Target of a mark against the files of all users."""
OF_LINKED: Final = f"{OF_ALL}/linked"
"""The same until one of the two files is gone that links of the build id lead to."""


def of_user(owner: int) -> str:
    """Target of a mark against the files of all users but one, whose other file was seen."""
    return f"{OF_ALL}/{owner}"


def is_against(mark: str, owner: int) -> bool:
    """Whether a mark ("": there is none) is one against files of a user."""
    return bool(mark) and mark != of_user(owner)


class DisputeMarks:
    """Marks by build id, in a folder of links (link_folders.py)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._allowance = Allowance(MARKS_AT_ONCE, MARKS_A_SECOND)
        self.count = 0
        """How many there are, as far as it is known."""

    @property
    def is_full(self) -> bool:
        """Whether no build id can be marked any more."""
        return self.count >= MAX_MARKS

    def of(self, build_id: str) -> str:
        """The mark of a build id, "" without one, and where marks are not for us to read. Raises
        OSError."""
        with suppress(FileNotFoundError, PermissionError):
            return os.readlink(self._path_of(build_id))  # noqa: PTH115
        return ""

    def put(self, build_id: str, mark: str, parties: Iterable[int]) -> bool:
        """Mark a build id; with another mark before, the result is one against all users.

        `parties`: who caused it, the first that may cause one more is charged. Returns whether
        any may. Raises OSError where it cannot be made, or is one too many.
        """
        known = self.of(build_id)
        if known in (mark, OF_ALL):
            return True
        if not known:
            if self.is_full:
                raise OSError(errno.ENOSPC, "as many build ids are disputed as may be")
            payer = next((it for it in parties if self._allowance.left(it) >= 1), None)
            if payer is None:
                return False
            self._allowance.take(payer, 1)
            self.count += 1
        put_link(self._path_of(build_id), OF_ALL if known else mark)
        return True

    def remove(self, build_id: str) -> None:
        """Its files are in no dispute any more. Raises OSError."""
        os.unlink(self._path_of(build_id))  # noqa: PTH108
        self.count -= 1

    def _path_of(self, build_id: str) -> str:
        return f"{self._folder}/{build_id}{SUFFIX}"


def put_link(path: str, target: str, owner: int | None = None) -> None:
    """Make a symbolic link, or replace it; of an owner where we may choose one. Raises OSError."""
    part = f"{path}.{os.getpid()}"
    try:
        os.symlink(target, part)  # noqa: PTH211
    except FileExistsError:  # of a process that ended before it had its name
        os.unlink(part)  # noqa: PTH108
        os.symlink(target, part)  # noqa: PTH211
    if owner is not None:
        with suppress(OSError):  # not root: there is one user here
            os.lchown(part, owner, -1)
    os.replace(part, path)  # noqa: PTH105
