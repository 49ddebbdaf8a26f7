# SPDX-License-Identifier: Apache-2.0
"""Runs commands of Sonde as children of another one: starts them again when they end, and ends
them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from sonde import interpreter
from sonde.cli import end_with_input
from sonde.errors import SinkError

FIRST_WAIT_S = 0.5
MAX_WAIT_S = 30.0
"""Before a restart: doubled at each failure up to this."""
STEADY_S = 60.0
"""A child that ran for longer than this has its earlier failures forgotten."""
END_S = 5.0
"""How long a child whose output has ended may take to end."""
FOR_GOOD = (0, 2, 3)
"""Exit codes after which a restart would end the same: done, wrong use, not on this machine."""


class Child:
    """`sonde NAME …` as a child. It ends when this process does, and the terminal's Ctrl-C does not
    reach it."""

    def __init__(self, arguments: Sequence[str], pass_fds: Sequence[int] = ()) -> None:
        """Start it; its standard error is this process's. Each start gets the descriptors
        `pass_fds`. Raises OSError."""
        self.name = arguments[0]
        self._arguments = list(arguments)
        self._pass_fds = tuple(pass_fds)
        self._failures = 0
        self._due_s = 0.0
        """When to start it again (CLOCK_MONOTONIC); 0: it runs, or its end is not known yet."""
        self._start()

    def _start(self) -> None:
        argv = interpreter.command("sonde.cli.main", *self._arguments, end_with_input.FLAG)
        self._started_s = time.monotonic()
        self.process = interpreter.start(
            argv, stderr=sys.stderr.fileno(), pass_fds=self._pass_fds, own_session=True
        )

    def ended_for_good(self) -> bool:
        """Whether it ended, and would end again if it were restarted."""
        return self.process.poll() in FOR_GOOD

    def start_again_if_due(self) -> None:
        """Start it again where it ended, after a pause that grows with each failure in a row."""
        now_s = time.monotonic()
        if self.process.poll() is None:
            return
        if not self._due_s:
            self._failures = (
                0 if now_s - self._started_s > STEADY_S else min(self._failures + 1, 10)
            )
            wait_s = min(MAX_WAIT_S, FIRST_WAIT_S * 2**self._failures)
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
        """Its exit code, where that is a failure's (1, 2, 3). Else raises SinkError with the cause
        `what`."""
        code = self.process.poll()
        if code in (1, 2, 3):
            return code
        raise SinkError(what, "its messages are above")

    def end(self, seconds: float) -> None:
        """Send it SIGTERM, wait for `seconds`, and kill it where it does not end."""
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
    """The first line of its standard output; '' where it ended, or there was none in `seconds`, or
    until `stop` returned True."""
    out = child.process.stdout
    assert out is not None
    until_s = time.monotonic() + seconds
    found = b""
    while time.monotonic() < until_s and not stop():
        if interpreter.is_readable(out.fileno(), 0.1):
            part = os.read(out.fileno(), 4_096)
            found += part
            if not part:
                break
            if b"\n" in found:
                return found.partition(b"\n")[0].decode("utf-8", "replace")
    if not stop() and time.monotonic() < until_s:
        child.process.wait(END_S)  # its output has ended, so it is about to end
    return ""
