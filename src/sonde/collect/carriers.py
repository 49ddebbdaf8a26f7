# SPDX-License-Identifier: Apache-2.0
"""Which processes may carry the injected library, as /proc shows it without a link being read."""

from __future__ import annotations

import os
from typing import Final

from sonde import procfs

LEAST_FD: Final = 600
"""The library keeps its descriptor at least this high where the limit allows it."""


def may_carry(pid: int) -> bool:
    """Does it hold a descriptor where the library puts its own? True, too, where its limit of
    descriptors is too low for that. Cheap: no link is read."""
    try:
        if (found := _holds(pid)) is None and (task := procfs.memory_task(pid)) != pid:
            found = _holds(task)
        if found:
            return True
    except OSError:
        return False
    limit = _most_files(pid)
    return limit is not None and limit <= LEAST_FD


def _holds(pid: int) -> bool | None:
    """Whether a descriptor is LEAST_FD or above; None where there is none at all. Raises
    OSError."""
    found = None
    with os.scandir(f"/proc/{pid}/fd") as entries:  # ascending: many are not read to the end
        for it in entries:
            if len(it.name) >= 3 and int(it.name) >= LEAST_FD:
                return True
            found = False
    return found


def _most_files(pid: int) -> int | None:
    """Its soft limit of descriptors; None where it has none or that is unknown."""
    try:
        with open(f"/proc/{pid}/limits", "rb") as file:  # noqa: PTH123
            for line in file.read(8192).split(b"\n"):
                if line.startswith(b"Max open files"):
                    soft = line.split()[3]
                    return None if soft == b"unlimited" else int(soft)
    except (OSError, IndexError, ValueError):
        return None
    return None


def same_tids(pid: int) -> bool:
    """Is the process known to be in no inner pid namespace, where its threads would have other
    numbers than here?"""
    credentials = procfs.read_credentials(pid)
    return credentials is not None and credentials.levels == 1
