# SPDX-License-Identifier: Apache-2.0
"""When a recording stops: at its time limit, with its command or processes, or by a signal.

The first SIGINT or SIGTERM stops the recording, and so does SIGHUP, unless it is ignored (nohup).
With a command running, the recording stops when the command exits, so that its shutdown is
recorded. The terminal sends Ctrl-C to the command as well; other signals are passed on to it. A
second signal aborts.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import time
from collections.abc import Iterable
from types import FrameType
from typing import TYPE_CHECKING, Self

from sonde.errors import UsageError

if TYPE_CHECKING:
    from sonde.cli.child import Child


class StopCondition:
    """A context manager that installs signal handlers; `is_met` is the condition.

    `reason` is why it is met. `is_unexpected`: the user did not ask for it, so it should be shown.
    """

    def __init__(
        self,
        duration_s: float | None = None,
        pids: Iterable[int] = (),
        child: Child | None = None,
    ) -> None:
        """Open a pidfd of each process, so that a reused pid is not mistaken for one of them.

        Raises UsageError for a pid that is not a process.
        """
        self.duration_s = duration_s
        self.signals = 0
        """How many came."""
        self.reason = ""
        self.is_unexpected = False
        self._child = child
        self._began = time.monotonic()
        self._alive = {}
        """By pidfd: the processes that have not ended."""
        for pid in pids:
            try:
                self._alive[os.pidfd_open(pid)] = pid
            except (OSError, OverflowError) as error:
                raise UsageError(
                    f"there is no process {pid}", "Look the pid up with: ps -e -o pid,args"
                ) from error
        self._watches_pids = bool(self._alive)

    def __enter__(self) -> Self:
        self._previous = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        for fd in self._alive:
            os.close(fd)
        self._alive.clear()

    def begin(self) -> None:
        """Count `duration_s` from now."""
        self._began = time.monotonic()

    @property
    def until_s(self) -> float:
        """When the time limit is reached, CLOCK_MONOTONIC; infinity without one."""
        return math.inf if self.duration_s is None else self._began + self.duration_s

    def is_met(self) -> bool:
        """Whether to stop the recording; sets `reason`."""
        if self._child is not None and self._child.reap():
            self.reason = f"{self._child} {self._child.how_it_ended()}"
        elif self.signals and self._child is None:
            self.reason = "stopped by a signal"
        elif self._watches_pids and not self._some_alive():
            self.reason = "all watched processes have ended"
            self.is_unexpected = True
        elif self.duration_s is not None and time.monotonic() >= self.until_s:
            self.reason = f"{self.duration_s:g} s are over"
        return bool(self.reason)

    def _some_alive(self) -> bool:
        if self._alive:
            poll = select.poll()
            for fd in self._alive:
                poll.register(fd, select.POLLIN)  # readable once the process has ended
            for fd, _ in poll.poll(0):
                os.close(fd)
                del self._alive[fd]
        return bool(self._alive)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self.signals:
            return  # kernel and shell may both send one when a terminal closes: it never aborts
        self.signals += 1
        if self.signals > 1:
            raise KeyboardInterrupt
        if self._child is not None and not (number == signal.SIGINT and _on_terminal()):
            self._child.send(number)


def _on_terminal() -> bool:
    """Whether this process group is in the terminal's foreground, so that Ctrl-C reaches the
    command, too."""
    with contextlib.suppress(OSError):
        fd = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            return os.tcgetpgrp(fd) == os.getpgrp()
        finally:
            os.close(fd)
    return False
