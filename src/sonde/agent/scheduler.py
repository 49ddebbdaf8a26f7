# SPDX-License-Identifier: Apache-2.0
"""When the agent drains its collectors: the interface of its schedulers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from sonde.collect.collector import Batch


class Scheduler(ABC):
    """Decides when the next tick is due."""

    fds: list[int]
    """Descriptors that wake the agent before the tick is due, once they are readable."""

    @property
    @abstractmethod
    def tick_s(self) -> float:
        """From the last tick to the next one, unless `is_woken` before."""

    @abstractmethod
    def is_woken(self) -> bool:
        """Whether the next tick is due at once."""

    @abstractmethod
    def on_tick(self, batches: Sequence[Batch], elapsed_s: float) -> None:
        """A tick is over: what it drained, and how long after the one before it came."""

    @abstractmethod
    def event_delay_s(self, gap_s: float) -> float:
        """How long process events that are not urgent may wait to be read. `gap_s`: how long the
        event loop sleeps after it has read some."""

    def between_ticks(self) -> None:
        """The agent woke up before a tick was due, and no process did anything."""

    def request_tick(self) -> None:
        """Have a tick soon, and wait for its end; called from other threads. Does nothing where
        the scheduler does not follow scrapes."""

    def reset(self) -> None:
        """Go back to the shortest interval."""

    def close(self) -> None:
        """No tick comes any more: `request_tick` returns."""
