# SPDX-License-Identifier: Apache-2.0
"""How much memory the build of an unwind table may take, by what the control groups leave.

A file of 24 MB may unpack to sections that take 420 MB. Where a control group has a limit (a
container, a unit), the kernel would end the builder there, and with `memory.oom.group` the agent
with it. So a build gets a share of what is left: one that needs more is refused, as other files
without a table are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Final

from sonde import procfs

SHARE: Final = 4
"""A build gets one part in this many of the memory that is left."""
LEAST_BYTES: Final = 32 << 20
"""A build gets this much in any case. Measured: 8 MB for DuckDB's library, 20 MB for the largest of
Rust's compiler, 68 MB for LLVM 15."""
MOST_BYTES: Final = 512 << 20
"""A build gets no more than this."""
LOOK_S: Final = 1.0
"""How long an answer holds."""
_CONTROLLERS: Final = ("v2", "memory")


class BuildMemory:
    """Asks the control groups of this process, which are also those of the builder."""

    def __init__(self, mounts: Mapping[str, str] | None = None) -> None:
        """`mounts`: where controllers are mounted, by name; as they are now where not given."""
        try:
            mounts = procfs.mounts_by_controller() if mounts is None else mounts
        except OSError:
            mounts = {}
        self._mounts = {name: point for name, point in mounts.items() if name in _CONTROLLERS}
        self._looked_s = 0.0
        self._bytes = 0

    def bytes(self) -> int:
        """Bytes that a build may take now, up to LOOK_S old. Raises nothing."""
        now_s = time.monotonic()
        if not self._bytes or now_s - self._looked_s > LOOK_S:
            self._looked_s = now_s
            self._bytes = max(LEAST_BYTES, min(MOST_BYTES, self._left() // SHARE))
        return self._bytes

    def _left(self) -> int:
        """Bytes until the nearest limit. Pages of files that were not used of late do not count:
        the kernel takes them back before it ends a process."""
        left = SHARE * MOST_BYTES
        # The roots, too: seen from a container, they are the container's groups.
        for folder in (*procfs.groups_of(os.getpid(), self._mounts), *self._mounts.values()):
            used, limit = procfs.working_set_of(folder)
            if limit:
                left = min(left, max(0, limit - used))
        return left
