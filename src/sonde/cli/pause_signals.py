# SPDX-License-Identifier: Apache-2.0
"""SIGUSR1 pauses a recorder, SIGUSR2 resumes it; neither ever ends it.

The sender cannot know whether recording has started. So both are caught from the start of the
process to its end, and a pause before the start takes effect at the start.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from sonde.agent import Agent

SIGNALS: Final = (signal.SIGUSR1, signal.SIGUSR2)


class _EarlyHandler:
    """The handler of both signals until a recorder takes over: remembers the last one."""

    last = 0
    """The last signal's number; 0: none came."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.last = number


def catch_early() -> None:
    """Install the early handler. In programs that are started later the signals have their default
    action: exec resets handlers."""
    early = _EarlyHandler()
    for number in SIGNALS:
        signal.signal(number, early)


class PauseSignals:
    """A context manager that installs the handlers of a recorder.

    Until `begin` the signals are blocked: each one would interrupt the loading of a BPF program. If
    both are pending then, SIGUSR1 is delivered first, so the recorder ends up running.
    """

    def __init__(self) -> None:
        self._agent: Agent | None = None
        self._is_paused = False

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        early = self._previous[signal.SIGUSR1]
        if isinstance(early, _EarlyHandler) and early.last:
            self._is_paused = early.last == signal.SIGUSR1
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def begin(self, agent: Agent) -> None:
        """Apply the signals to `agent` from now on, and a pause that was requested before."""
        self._agent = agent
        if self._is_paused:
            agent.pause()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_paused = number == signal.SIGUSR1
        if self._agent is not None:
            if self._is_paused:
                self._agent.pause()
            else:
                self._agent.resume()
