# SPDX-License-Identifier: Apache-2.0
"""Reports processes that are missing from a result because reading them would block."""

from __future__ import annotations

from sonde import procfs


def counts() -> dict[str, int]:
    """How many processes are missing, and of how many others files are missing."""
    processes, files = procfs.BROKER.left_alone()
    return {"processes": processes, "processes_with_files": files}


def line() -> str:
    """The counts as a line for people; '' where nothing is missing."""
    processes, files = procfs.BROKER.left_alone()
    parts = []
    if processes:
        parts.append(f"{processes} process{'es' if processes != 1 else ''}")
    if files:
        parts.append(f"files of {files} process{'es' if files != 1 else ''}")
    return f"left out: {' and '.join(parts)} that block their readers" if parts else ""
