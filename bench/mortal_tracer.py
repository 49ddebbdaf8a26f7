# SPDX-License-Identifier: Apache-2.0
"""The product's attaching process, killed in the act.

    mortal_tracer.py MICROSECONDS PID FILE NAME SECONDS

From the moment at which it reaches for its first thread, a child waits so long and then kills it
with SIGKILL. Nothing else differs.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from sonde import _native
from sonde.attach import tracer


def kill_me_in(microseconds: int) -> None:
    """A child that does so."""
    victim, until = os.getpid(), time.monotonic() + microseconds / 1e6
    if os.fork() == 0:
        while time.monotonic() < until:
            pass
        os.kill(victim, signal.SIGKILL)
        os._exit(0)


BORROWER = _native.ThreadBorrower


class Mortal:
    """A ThreadBorrower that starts the clock at its first thread."""

    def __init__(self, pid: int, landmarks: _native.Landmarks, auxv: bytes) -> None:
        self._inner = BORROWER(pid, landmarks, auxv)
        self._left = int(sys.argv[1])

    def load(self, *arguments: Any, **named: Any) -> _native.Attempt:
        """Load, but not for long."""
        if self._left:
            kill_me_in(self._left)
            self._left = 0
        return self._inner.load(*arguments, **named)

    def filters(self, tid: int) -> list[bytes]:
        """As it is."""
        return self._inner.filters(tid)

    def settle(self) -> None:
        """As it is."""
        self._inner.settle()

    def close(self) -> None:
        """As it is."""
        self._inner.close()


if __name__ == "__main__":
    tracer._native.ThreadBorrower = Mortal  # type: ignore[misc,assignment,attr-defined]
    tracer.main(sys.argv[2:])
