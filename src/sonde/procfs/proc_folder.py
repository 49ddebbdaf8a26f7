# SPDX-License-Identifier: Apache-2.0
"""Where the child of the broker (serve.py) looks /proc up: in an instance of procfs that nobody
else sees, where it was given one (lookups.py), which is its working directory then. Nobody can keep
a folder of that locked. Without its package, as serve.py."""

from __future__ import annotations

import os

is_own = False
"""Whether it was given one."""


def use(root: int) -> None:
    """Look /proc up in this instance from now on. Raises OSError."""
    global is_own
    os.fchdir(root)
    is_own = True


def here(path: str) -> str:
    """A path by which the kernel finds what `path` is for everybody: of /proc in our instance."""
    if is_own and path.startswith("/proc") and path[5:6] in ("", "/"):
        return path[len("/proc/") :] or "."
    return path
