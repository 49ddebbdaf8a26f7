# SPDX-License-Identifier: Apache-2.0
"""Weighted stacks: what every picture is drawn from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sonde.model.code import Stacks
from sonde.model.process import Thread

KINDS = ("cpu", "blocked", "runqueue", "device")
"""On a CPU; waiting for something; waiting for a CPU; inside a call to a device."""
KERNEL = "kernel"
"""Running on a device, under the stack that asked for it; of processes that carry our library."""


MEMORY = ("mapped", "faulted", "held")
"""Mapped into an address space; touched for the first time; mapped and not unmapped since."""


class ProfileRow(NamedTuple):
    """One stack of one thread, with its estimated weight."""

    thread: int
    """Index into `Profile.threads`."""
    stack: int
    """Index into `Profile.stacks`."""
    name: str
    """'' on a CPU; reason of a wait; function of a device call; kind of memory."""
    events: int
    """Samples, waits or calls."""
    ns: int
    """Time on a CPU, waiting, or inside the call."""
    bytes: int
    """Bytes moved or allocated by the calls, mapped or touched."""


@dataclass(frozen=True, slots=True)
class Profile:
    """All stacks of one kind, columnwise; iterate for rows."""

    kind: str
    stacks: Stacks
    threads: Sequence[Thread]
    names: Sequence[str]
    """One of each name that occurs."""
    row_thread: Sequence[int]
    row_stack: Sequence[int]
    row_name: Sequence[int]
    """Indices into `names`."""
    row_events: Sequence[int]
    row_ns: Sequence[int]
    row_bytes: Sequence[int]

    def __len__(self) -> int:
        return len(self.row_stack)

    def __iter__(self) -> Iterator[ProfileRow]:
        names = self.names
        columns = zip(
            self.row_thread,
            self.row_stack,
            self.row_name,
            self.row_events,
            self.row_ns,
            self.row_bytes,
            strict=True,
        )
        for thread, stack, name, events, ns, moved in columns:
            yield ProfileRow(thread, stack, names[name], events, ns, moved)

    @property
    def row_weight(self) -> Sequence[int]:
        """What the kind is measured in: bytes of memory, time of anything else."""
        return self.row_bytes if self.kind in MEMORY else self.row_ns

    @property
    def total_events(self) -> int:
        """Events of all rows."""
        return sum(self.row_events)

    @property
    def total_ns(self) -> int:
        """Time of all rows."""
        return sum(self.row_ns)

    @property
    def total_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(self.row_bytes)
