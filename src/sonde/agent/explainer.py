# SPDX-License-Identifier: Apache-2.0
"""Has a child explain windows, without making the agent wait."""

from __future__ import annotations

import subprocess
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from sonde import interpreter
from sonde.diagnose import child as child_module
from sonde.diagnose.incident import Verdict
from sonde.diagnose.moments import Window

DEADLINE_S: Final = 5.0
"""For one answer; a child that takes longer is killed."""
WAITING: Final = 16
"""Windows that wait; more are left out and counted."""
MAX_BYTES: Final = 64 << 20
"""Of one window."""


@dataclass(slots=True)
class _Asked:
    window: bytes
    answer: Callable[[Verdict | None], None]


class Explainer:
    """One child, started when it is first needed, asked by one thread."""

    def __init__(self, failed: Callable[[BaseException], None] = lambda _: None) -> None:
        """`failed` is called with what went wrong with an answer."""
        self._failed = failed
        self.left_out = 0
        """Windows that nobody explained."""
        self._waiting: deque[_Asked] = deque()
        self._there = threading.Semaphore(0)
        self._ended = False
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="sonde-explain", daemon=True)

    def start(self) -> None:
        """Begin to wait for windows; the child is started too, so that it is there in time."""
        self._thread.start()
        self._there.release()

    def ask(
        self, window: Window, *, is_last_look: bool, answer: Callable[[Verdict | None], None]
    ) -> None:
        """Have a window explained; `answer` is called from another thread. At once."""
        look = child_module.LAST_LOOK if is_last_look else child_module.FIRST_LOOK
        raw = look + msgspec.json.encode(window) + b"\n"
        if len(self._waiting) >= WAITING or len(raw) > MAX_BYTES:
            self.left_out += 1
            return
        self._waiting.append(_Asked(raw, answer))
        self._there.release()

    @property
    def pids(self) -> set[int]:
        """Of the child."""
        return {self._child.pid} if self._child is not None else set()

    def close(self) -> None:
        """Answer no more."""
        self._ended = True
        self._there.release()
        if self._thread.is_alive():
            self._thread.join(DEADLINE_S)
        if self._child is not None:
            interpreter.give_up(self._child)

    def _run(self) -> None:
        while True:
            self._there.acquire()
            if self._ended:
                return
            with suppress(OSError):
                self._alive()
            if self._waiting:
                asked = self._waiting.popleft()
                try:
                    asked.answer(self._explain(asked.window))
                except Exception as error:  # this thread answers the next one, too
                    self.left_out += 1
                    self._failed(error)

    def _alive(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._child = interpreter.start(interpreter.command("sonde.diagnose.child"))
        return self._child

    def _explain(self, raw: bytes) -> Verdict | None:
        try:
            child = self._alive()
            assert child.stdin is not None and child.stdout is not None
            timer = threading.Timer(DEADLINE_S, child.kill)
            timer.start()
            try:
                child.stdin.write(raw)
                child.stdin.flush()
                line = child.stdout.readline()
            finally:
                timer.cancel()
            answer = msgspec.json.decode(line, type=child_module.Answer)
        except (OSError, ValueError, msgspec.DecodeError):
            self.left_out += 1
            if self._child is not None:
                interpreter.give_up(self._child)
                self._child = None
            return None
        if answer.failed:
            self.left_out += 1
            self._failed(ValueError(answer.failed))
        return answer.verdict
