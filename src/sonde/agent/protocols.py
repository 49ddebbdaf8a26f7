# SPDX-License-Identifier: Apache-2.0
"""The interfaces of those that take the agent's rows, and how far its recording is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sonde.collect.collector import Batch


class Sink(Protocol):
    """Takes finished chunks."""

    written_bytes: int

    def write(self, chunk: bytes) -> None:
        """Take a chunk, or raise SinkError, with the chunks before it unharmed."""

    def close(self) -> None:
        """No more chunks come."""

    def losses(self) -> Mapping[str, int]:
        """What was lost of chunks that were taken, by the name of the loss."""

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the sink, by the names of the catalogue."""


class Observer(Protocol):
    """Sees the rows of each tick, in this process."""

    def on_tick(self, since_ns: int, now_ns: int, batches: Sequence[Batch]) -> None:
        """What was seen from `since_ns` to `now_ns` (CLOCK_MONOTONIC), waits that go on included.
        Must return within milliseconds and keep no batch."""

    def chosen(self) -> Mapping[int, bool]:
        """Processes of which waits are counted from now on; True: stacks are taken, too."""

    def suspects(self) -> bool:
        """Whether it suspects something: then an incident may follow soon (`diagnose`), so what is
        costly to read is read more often."""

    def is_calm(self) -> bool:
        """Whether little happens, and nothing that a later tick would show too late: ticks may be
        further apart."""

    def worth(self, pid: int, stack_id: int) -> float:
        """How much it is worth to name a stack: the time (ns) that it stands for, or a multiple of
        it. The stack that is worth most is named first; one that is worth 0 is not named."""


@dataclass(frozen=True, slots=True)
class Live:
    """How far a recording is, for a line that is shown while it runs: counts since its start."""

    elapsed_s: float
    samples: int
    """On-CPU samples."""
    waits: int
    device_calls: int
    spans: int
    """Rows with a start and an end (table `span`): single waits and calls."""
    lost: int
    """The sum of all losses (`agent.losses`)."""
    processes: int
    written_bytes: int
