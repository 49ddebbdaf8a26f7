# SPDX-License-Identifier: Apache-2.0
"""Reports processes that are missing from a result because reading them would block."""

from __future__ import annotations

from sonde import procfs


def counts() -> dict[str, int]:
    """How many processes are missing, of how many others files are missing, and how often so far
    a process was put off as others answered late."""
    processes, files = procfs.BROKER.left_alone()
    put_off = procfs.BROKER.patience.processes_put_off
    return {"processes": processes, "processes_with_files": files, "put_off": put_off}


def line() -> str:
    """The counts as a line for people; '' where nothing is missing."""
    processes, files = procfs.BROKER.left_alone()
    parts = []
    if processes:
        parts.append(f"{processes} process{'es' if processes != 1 else ''}")
    if files:
        parts.append(f"files of {files} process{'es' if files != 1 else ''}")
    left_out = (
        f"left out: {' and '.join(parts)}: a read of them did not end in time (a locked memory "
        "map, a disk that does not answer); the rest is complete"
    )
    put_off = procfs.BROKER.patience.processes_put_off
    late = f"put off {put_off:,} times so far: processes beside others that answer late"
    return "; ".join(filter(None, [left_out if parts else "", late if put_off else ""]))
