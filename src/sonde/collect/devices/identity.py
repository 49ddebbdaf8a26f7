# SPDX-License-Identifier: Apache-2.0
"""Who a pid is now: drivers tell pids, and pids are used again."""

from __future__ import annotations

import os
from pathlib import Path

from sonde.collect.collector import START_UNIT_NS

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def start_of(pid: int) -> str:
    """Start of a process in ns since boot, cut to 10 ms, as text; '' for one that is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    start_ns = int(stat.rpartition(")")[2].split()[19]) * _TICK_NS
    return str(start_ns - start_ns % START_UNIT_NS)
