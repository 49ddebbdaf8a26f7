# SPDX-License-Identifier: Apache-2.0
"""What is missing from an answer, because it makes its readers wait."""

from __future__ import annotations

from sonde import procfs


def counts() -> dict[str, int]:
    """Processes that are left alone now, and those of which files are."""
    processes, files = procfs.BROKER.left_alone()
    return {"processes": processes, "processes_with_files": files}


def line() -> str:
    """One line for people; '' where nothing is missing."""
    processes, files = procfs.BROKER.left_alone()
    parts = []
    if processes:
        parts.append(f"{processes} process{'es' if processes != 1 else ''}")
    if files:
        parts.append(f"files of {files} process{'es' if files != 1 else ''}")
    return f"left out: {' and '.join(parts)} that make their readers wait" if parts else ""
