# SPDX-License-Identifier: Apache-2.0
"""Numbers for control groups, by which their processes are one party (rule 4 of parties.py)."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Final

from sonde.procfs.group_mounts import group_mounts

MAX_GROUPS: Final = 4096
"""Control groups that have a number at the same time."""
FIRST: Final = -(1 << 32)
"""Numbers count down from here: no pid is so large. None is given twice."""
LOOK_EVERY_S: Final = 60.0
"""Between two looks which groups are gone, where no number is left."""


class GroupNumbers:
    """Numbers of control groups that exist."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._next = FIRST
        self._looked_s = -LOOK_EVERY_S

    def of(self, path: str) -> int | None:
        """The number of a group, the same as long as there is the group; None: none is left. A
        path that does not begin with "/" is of no group, and keeps its number."""
        if path not in self._numbers and len(self._numbers) >= MAX_GROUPS:
            self._drop_gone(path)
            if len(self._numbers) >= MAX_GROUPS:
                return None
        if path not in self._numbers:
            self._numbers[path] = self._next
            self._next -= 1
        return self._numbers[path]

    def name_of(self, number: int) -> str:
        """The path of a number; "" where its group is gone."""
        return next((path for path, it in self._numbers.items() if it == number), "")

    def _drop_gone(self, there: str) -> None:
        """Take the numbers of groups that are gone; `there`: a group that is not."""
        now_s = time.monotonic()
        if now_s < self._looked_s + LOOK_EVERY_S:
            return
        self._looked_s = now_s
        with suppress(OSError):
            points = [mount.point for mount in group_mounts()]
            # Else what is mounted here is another part of the hierarchies than that of the paths.
            if not there.startswith("/") or _exists(points, there):
                self._numbers = {
                    path: number
                    for path, number in self._numbers.items()
                    if not path.startswith("/") or _exists(points, path)
                }


def _exists(points: list[str], path: str) -> bool:
    return any(os.path.exists(point + path) for point in points)  # noqa: PTH110 (Path interns it)
