# SPDX-License-Identifier: Apache-2.0
"""SIGUSR1 pauses a recorder, SIGUSR2 has it go on; neither ever ends it.

Whoever sends them cannot know how far the recorder is. So both are caught from the first moment and
to the last: what was asked for before anything was observed holds from the start.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from sonde.agent import Agent

SIGNALS: Final = (signal.SIGUSR1, signal.SIGUSR2)


class _Early:
    """The handler of both before it is known which command this is: remembers the last one."""

    last = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.last = number


def catch_early() -> None:
    """From now on they end nothing. A program that is started has them as ever, because no handler
    outlives exec."""
    early = _Early()
    for number in SIGNALS:
        signal.signal(number, early)


class Pausing:
    """A context that holds the handlers.

    Until `begin` the signals wait: the kernel gives up loading a BPF program for every one that
    arrives meanwhile. Of several kinds that wait, to pause comes first and to go on counts.
    """

    def __init__(self) -> None:
        self._agent: Agent | None = None
        self._pauses = False

    def __enter__(self) -> Self:
        self._former = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        early = self._former[signal.SIGUSR1]
        if isinstance(early, _Early) and early.last:
            self._pauses = early.last == signal.SIGUSR1
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def begin(self, agent: Agent) -> None:
        """From now on it is `agent` that pauses, at once if that was asked for already."""
        self._agent = agent
        if self._pauses:
            agent.pause()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._pauses = number == signal.SIGUSR1
        if self._agent is not None:
            if self._pauses:
                self._agent.pause()
            else:
                self._agent.resume()
