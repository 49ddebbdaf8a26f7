# SPDX-License-Identifier: Apache-2.0
"""Has a child process explain windows (`diagnose.child`), without making the agent wait."""

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
MAX_WAITING: Final = 16
"""Windows that wait; more are left out and counted."""
MAX_OF_PARTY: Final = 12
"""Of these of one party (`procfs.party_of`)."""
MAX_BYTES: Final = 64 << 20
"""Of one window as JSON; a larger one is left out and counted."""


@dataclass(slots=True)
class _Request:
    window: bytes
    """A line as the child reads it: which look it is, and the window as JSON."""
    answer: Callable[[Verdict | None], None]
    party: int | None


class Explainer:
    """One child, to which one thread writes requests, and from which it reads answers."""

    def __init__(self, failed: Callable[[BaseException], None] = lambda _: None) -> None:
        """`failed` is called with the error of a window that could not be explained, or whose
        answer could not be taken."""
        self._failed = failed
        self.left_out = 0
        """Windows that were not explained, or whose answer was not taken."""
        self._waiting: deque[_Request] = deque()
        self._wakeups = threading.Semaphore(0)
        self._ended = False
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="sonde-explain", daemon=True)

    def start(self) -> None:
        """Begin to wait for windows; the child is started too, so that it is there in time."""
        self._thread.start()
        self._wakeups.release()

    def ask(
        self,
        window: Window,
        *,
        is_last_look: bool,
        answer: Callable[[Verdict | None], None],
        party: int | None = None,
    ) -> None:
        """Have a window explained. Returns at once; `answer` is called from another thread, with
        None where the child failed. `is_last_look`: there is no later look at the suspicion.
        `party`: whose windows of this kind are bounded together (`MAX_OF_PARTY`)."""
        look = child_module.LAST_LOOK if is_last_look else child_module.FIRST_LOOK
        raw = look + msgspec.json.encode(window) + b"\n"
        waiting = self._waiting.copy()  # the thread takes some meanwhile
        its = sum(one.party == party for one in waiting) if party is not None else 0
        is_full = len(waiting) >= MAX_WAITING or its >= MAX_OF_PARTY
        if is_full or len(raw) > MAX_BYTES:
            self.left_out += 1
            return
        self._waiting.append(_Request(raw, answer, party))
        self._wakeups.release()

    @property
    def pids(self) -> set[int]:
        """The child's pid; none where it does not run."""
        return {self._child.pid} if self._child is not None else set()

    def close(self) -> None:
        """End the thread and the child; windows that wait get no answer."""
        self._ended = True
        self._wakeups.release()
        if self._thread.is_alive():
            self._thread.join(DEADLINE_S)
        if self._child is not None:
            interpreter.give_up(self._child)

    def _run(self) -> None:
        while True:
            self._wakeups.acquire()
            if self._ended:
                return
            with suppress(OSError):
                self._running_child()
            if self._waiting:
                request = self._waiting.popleft()
                try:
                    request.answer(self._explain(request.window))
                except Exception as error:  # the thread must go on with the next one
                    self.left_out += 1
                    self._failed(error)

    def _running_child(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._child = interpreter.start(
                interpreter.command("sonde.diagnose.child"), ends_first=True
            )
        return self._child

    def _explain(self, raw: bytes) -> Verdict | None:
        try:
            child = self._running_child()
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
