# SPDX-License-Identifier: Apache-2.0
"""Which processes may carry our library, told by what /proc shows without a link being read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from sonde.collect.collector import START_UNIT_NS

LEAST_FD: Final = 600
"""The library keeps its descriptor at least this high where the limit allows it."""
_CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")


def pids() -> Iterator[int]:
    """Every process."""
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                yield int(entry.name)


def start_and_parent(pid: int) -> tuple[int, int] | None:
    """(start in ns since boot, parent) of a process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            fields = file.read(4096).rpartition(b")")[2].split()
        start_ns = int(fields[19]) * 1_000_000_000 // _CLOCK_TICKS
        return start_ns // START_UNIT_NS * START_UNIT_NS, int(fields[1])
    except (OSError, IndexError, ValueError):
        return None


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
    with suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:  # noqa: PTH123
        for line in file.read(8192).splitlines():
            if line.startswith(b"NSpid:"):
                return len(line.split()) == 2
    return True
