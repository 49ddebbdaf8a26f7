# SPDX-License-Identifier: Apache-2.0
"""Has a child take the stacks of ranks (`rank_dump`), with a deadline."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from sonde import interpreter
from sonde.agent.rank_dump import RankStacks

MAX_BYTES: Final = 16 << 20
"""Of one answer."""
BLOCK: Final = 1 << 16


class RankStackReader:
    """One child, started when it is first needed. Of one thread."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self.failed = 0
        """Times that the child gave no answer in time."""

    @property
    def pids(self) -> set[int]:
        """Of the child."""
        return {self._child.pid} if self._child is not None else set()

    def take(self, pids: Sequence[int], within_s: float) -> dict[int, RankStacks]:
        """What was seen of each process in that time. Raises nothing."""
        until_s = time.monotonic() + within_s
        found: dict[int, RankStacks] = {}
        try:
            child = self._alive()
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
            self.close()  # what it still writes belongs to this request
        return found

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            interpreter.give_up(self._child)
            self._child = None

    def _alive(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._child = interpreter.start(interpreter.command("sonde.agent.rank_dump"))
        return self._child


def _lines(fd: int, count: int, until_s: float) -> Iterable[bytes]:
    """As many lines as come in time."""
    kept = b""
    while count > 0:
        left_s = until_s - time.monotonic()
        if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
            return
        block = os.read(fd, BLOCK)
        kept += block
        if not block or len(kept) > MAX_BYTES:
            return
        while count > 0 and b"\n" in kept:
            line, _, kept = kept.partition(b"\n")
            count -= 1
            yield line
