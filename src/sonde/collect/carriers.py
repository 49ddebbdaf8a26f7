# SPDX-License-Identifier: Apache-2.0
"""Which processes may carry our library, told by what /proc shows without a link being read."""

from __future__ import annotations

import os
from typing import Final

from sonde import procfs

LEAST_FD: Final = 600
"""The library keeps its descriptor at least this high where the limit allows it."""


def may_carry(pid: int) -> bool:
    """Does it hold a descriptor where the library puts its own? Cheap: no link is read."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208
    except OSError:
        return False
    if any(len(name) >= 3 and int(name) >= LEAST_FD for name in names):
        return True
    limit = _most_files(pid)
    return limit is not None and limit <= LEAST_FD


def _most_files(pid: int) -> int | None:
    """The limit of its descriptors; None unknown."""
    try:
        with open(f"/proc/{pid}/limits", "rb") as file:  # noqa: PTH123
            for line in file.read(8192).splitlines():
                if line.startswith(b"Max open files"):
                    soft = line.split()[3]
                    return None if soft == b"unlimited" else int(soft)
    except (OSError, IndexError, ValueError):
        return None
    return None


def same_tids(pid: int) -> bool:
    """Do its threads have the same numbers there and here?"""
    owner = procfs.read_owner(pid)
    return owner is None or owner.levels == 1
