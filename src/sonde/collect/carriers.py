# SPDX-License-Identifier: Apache-2.0
"""Which processes may carry the injected library, as /proc shows it without a link being read."""

from __future__ import annotations

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
    # Ascending: of many the first ones decide.
    for name in procfs.names_in(f"/proc/{pid}/fd", LEAST_FD + 1):
        if int(name) >= LEAST_FD:
            return True
        found = False
    return found


def _most_files(pid: int) -> int | None:
    """Its soft limit of descriptors; None where it has none or that is unknown."""
    try:
        for line in (procfs.read_file(f"/proc/{pid}/limits", 8192) or b"").split(b"\n"):
            if line.startswith(b"Max open files"):
                soft = line.split()[3]
                return None if soft == b"unlimited" else int(soft)
    except (IndexError, ValueError):
        return None
    return None


def same_tids(pid: int) -> bool:
    """Is the process known to be in no inner pid namespace, where its threads would have other
    numbers than here?"""
    credentials = procfs.read_credentials(pid)
    return credentials is not None and credentials.levels == 1
