# SPDX-License-Identifier: Apache-2.0
"""When a recording ends: its time is up, its command or processes are gone, or someone asked.

The first Ctrl-C or SIGTERM asks for the end, and so does a terminal that hangs up (SIGHUP), unless
that is ignored, as nohup has it. With a command running, the end is the command's:
the terminal sent it the Ctrl-C too (and what did not come from a terminal is passed on), and how it
shuts down is part of what is recorded. A second one aborts.
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


class Ending:
    """A context that holds the signal handlers and answers `due()`.

    `reason` says why it ended; `unforeseen` that the user may want to be told.
    """

    def __init__(
        self,
        duration_s: float | None = None,
        pids: Iterable[int] = (),
        child: Child | None = None,
    ) -> None:
        """Take hold of the processes, so that a pid used again is not mistaken for one of them.

        Raises UsageError for a pid that is not a process.
        """
        self.duration_s = duration_s
        self.asked = 0
        self.reason = ""
        self.unforeseen = False
        self._child = child
        self._began = time.monotonic()
        self._alive = {}
        for pid in pids:
            try:
                self._alive[os.pidfd_open(pid)] = pid
            except (OSError, OverflowError) as error:
                raise UsageError(
                    f"there is no process {pid}", "Look the pid up with: ps -e -o pid,args"
                ) from error
        self._watches_pids = bool(self._alive)

    def __enter__(self) -> Self:
        self._former = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        for fd in self._alive:
            os.close(fd)
        self._alive.clear()

    def begin(self) -> None:
        """The clock of `duration_s` starts now."""
        self._began = time.monotonic()

    @property
    def until_s(self) -> float:
        """When the time is up, CLOCK_MONOTONIC."""
        return math.inf if self.duration_s is None else self._began + self.duration_s

    def due(self) -> bool:
        """Whether the recording shall end; `reason` then says why."""
        if self._child is not None and self._child.reap():
            self.reason = f"{self._child} {self._child.how_it_ended()}"
        elif self.asked and self._child is None:
            self.reason = "asked to end"
        elif self._watches_pids and not self._some_alive():
            self.reason = "all watched processes have ended"
            self.unforeseen = True
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
        if number == signal.SIGHUP and self.asked:
            return  # a hang-up is sent once, and by several; it never aborts
        self.asked += 1
        if self.asked > 1:
            raise KeyboardInterrupt
        if self._child is not None and not (number == signal.SIGINT and _on_terminal()):
            self._child.send(number)


def _on_terminal() -> bool:
    """Whether our process group has the terminal, so that its Ctrl-C reaches the command too."""
    with contextlib.suppress(OSError):
        fd = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            return os.tcgetpgrp(fd) == os.getpgrp()
        finally:
            os.close(fd)
    return False
