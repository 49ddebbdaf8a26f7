# SPDX-License-Identifier: Apache-2.0
"""When the process of a pid started: drivers report pids alone, and pids are used again."""

from __future__ import annotations

from sonde import procfs


def start_of(pid: int) -> str:
    """Start of a process in ns since boot, cut to 10 ms, as text; '' for one that is gone."""
    stat = procfs.read_stat(pid)
    return "" if stat is None else str(stat.start_ns)
