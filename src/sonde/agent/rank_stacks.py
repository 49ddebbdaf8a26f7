# SPDX-License-Identifier: Apache-2.0
"""Has a child take the stacks of ranks (`rank_dump`), with a deadline."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from sonde import interpreter
from sonde.agent.rank_dump import RankStacks

MAX_BYTES: Final = 16 << 20
"""Of output of the child that has no end of a line yet."""
BLOCK_BYTES: Final = 1 << 16
"""Read at once."""


class RankStackReader:
    """One child, started when it is first needed. To be used by one thread."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self.failed = 0
        """Requests to which the answer was not complete in time."""

    @property
    def pids(self) -> set[int]:
        """The child's pid; none where it does not run."""
        return {self._child.pid} if self._child is not None else set()

    def take(self, pids: Sequence[int], within_s: float) -> dict[int, RankStacks]:
        """The stacks of each process that the child gave in that time. Raises nothing."""
        until_s = time.monotonic() + within_s
        found: dict[int, RankStacks] = {}
        try:
            child = self._running_child()
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(msgspec.json.encode(list(pids)) + b"\n")
            child.stdin.flush()
            for line in _lines(child.stdout.fileno(), len(pids), until_s):
                one = msgspec.json.decode(line, type=RankStacks)
                if one.pid in pids:
                    found[one.pid] = one
        except (OSError, ValueError, msgspec.DecodeError):
            pass
        if len(found) < len(set(pids)):
            self.failed += 1
            self.close()  # what it still writes would be taken as the next answer
        return found

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            interpreter.give_up(self._child)
            self._child = None

    def _running_child(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._child = interpreter.start(
                interpreter.command("sonde.agent.rank_dump"), ends_first=True
            )
        return self._child


def _lines(fd: int, count: int, until_s: float) -> Iterable[bytes]:
    """`count` lines, or those that come until `until_s` (CLOCK_MONOTONIC)."""
    kept = b""
    while count > 0:
        left_s = until_s - time.monotonic()
        if left_s <= 0 or not interpreter.is_readable(fd, left_s):
            return
        block = os.read(fd, BLOCK_BYTES)
        kept += block
        if not block or len(kept) > MAX_BYTES:
            return
        while count > 0 and b"\n" in kept:
            line, _, kept = kept.partition(b"\n")
            count -= 1
            yield line
