# SPDX-License-Identifier: Apache-2.0
"""Commands of Sonde that another command runs: started again when they die, ended in order."""

from __future__ import annotations

import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from sonde import interpreter
from sonde.cli import end_with_input
from sonde.errors import SinkError

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
STEADY_S = 60.0
"""A child that ran so long did not fail at once: its next start is not put off."""
END_S = 5.0
FOR_GOOD = (0, 2, 3)
"""Exit codes after which another start would end the same: done, wrong use, not on this machine."""


class Child:
    """`sonde NAME …` as a child. It ends with this process, and gets no separate Ctrl-C."""

    def __init__(self, arguments: Sequence[str], pass_fds: Sequence[int] = ()) -> None:
        """Start it; what it writes to standard error is shown. Each start gets the descriptors
        `pass_fds`. Raises OSError."""
        self.name = arguments[0]
        self._arguments = list(arguments)
        self._pass_fds = tuple(pass_fds)
        self._failures = 0
        self._due_s = 0.0
        self._start()

    def _start(self) -> None:
        argv = interpreter.command("sonde.cli.main", *self._arguments, end_with_input.FLAG)
        self._started_s = time.monotonic()
        self.process = interpreter.start(
            argv, stderr=sys.stderr.fileno(), pass_fds=self._pass_fds, own_session=True
        )

    def ended_for_good(self) -> bool:
        """Whether it ended, and would again."""
        return self.process.poll() in FOR_GOOD

    def start_again_if_due(self) -> None:
        """Start it again where it died, ever more rarely while it keeps dying."""
        now_s = time.monotonic()
        if self.process.poll() is None:
            return
        if not self._due_s:
            self._failures = (
                0 if now_s - self._started_s > STEADY_S else min(self._failures + 1, 10)
            )
            wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**self._failures)
            self._due_s = now_s + random.uniform(wait_s / 2, wait_s)
            print(
                f"sonde: `sonde {self.name}` ended with {self.process.returncode}; "
                f"it starts again in {self._due_s - now_s:.1f} s",
                file=sys.stderr,
                flush=True,
            )
        elif now_s >= self._due_s:
            self._due_s = 0.0
            _close(self.process)
            self._start()

    def failed(self, what: str) -> int:
        """Its exit code, where it is one of a failure. Raises SinkError otherwise."""
        code = self.process.poll()
        if code in (1, 2, 3):
            return code
        raise SinkError(what, "its messages are above")

    def end(self, seconds: float) -> None:
        """Ask it to end, wait, and kill it where it does not."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                interpreter.give_up(self.process)
        _close(self.process)


def _close(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def first_line(child: Child, seconds: float, stop: Callable[[], bool]) -> str:
    """The first line of its standard output; '' where it ended, took too long, or `stop`."""
    out = child.process.stdout
    assert out is not None
    ends = time.monotonic() + seconds
    found = b""
    while time.monotonic() < ends and not stop():
        if select.select([out], [], [], 0.1)[0]:
            part = os.read(out.fileno(), 4_096)
            found += part
            if not part:
                break
            if b"\n" in found:
                return found.partition(b"\n")[0].decode("utf-8", "replace")
    if not stop() and time.monotonic() < ends:
        child.process.wait(END_S)  # its output ended, and so does it
    return ""
