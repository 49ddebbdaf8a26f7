# SPDX-License-Identifier: Apache-2.0
"""Whether the memory limits of a process leave room for a trace: beyond them it is killed."""

from __future__ import annotations

from typing import Final

from sonde import procfs
from sonde.errors import TargetRefused

MB: Final = 1_000_000
LEAST_BYTES: Final = 512 * MB
"""A trace takes up to 320 MB; the rest is for what the program allocates meanwhile."""


def require(pid: int) -> None:
    """Raise TargetRefused where the control groups of a process leave it less than LEAST_BYTES."""
    left = procfs.memory_left(pid)
    if left is None or left.bytes >= LEAST_BYTES:
        return
    raise TargetRefused(
        f"process {pid} has {left.bytes // MB:,} MB of memory left in its control group, of "
        f"{left.limit // MB:,} MB (what it read of files counts): a trace takes up to 320 MB, and "
        "beyond its limit the kernel would end the process",
        f"Raise its memory limit so that {LEAST_BYTES // MB} MB are left, or record it without a "
        f"trace: sonde record --device-time -p {pid}",
    )
