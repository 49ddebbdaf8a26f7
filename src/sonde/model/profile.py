# SPDX-License-Identifier: Apache-2.0
"""Profiles: weighted stacks, which flame graphs and other profile formats are made from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from sonde.model.code import Stacks
from sonde.model.process import Thread


class ProfileKind(StrEnum):
    """What a profile measures. The values are those of `sonde report --metric`."""

    ON_CPU = "on-cpu"
    """Time on a CPU, estimated from samples."""
    OFF_CPU = "off-cpu"
    """Time blocked: in a lock, I/O, a sleep. Named by the reason of the wait."""
    RUN_QUEUE = "run-queue"
    """Time runnable, but waiting for a CPU."""
    GPU_CALLS = "gpu-calls"
    """Host time inside calls of a device API (CUDA, OpenCL), and the bytes that they move."""
    GPU_TIME = "gpu-time"
    """Time on the device itself, under the host stack that launched the work."""
    MEMORY_MAPPED = "memory-mapped"
    """Bytes that mmap and brk added to the address space."""
    MEMORY_FAULTED = "memory-faulted"
    """Bytes that page faults brought in: memory touched for the first time."""
    MEMORY_HELD = "memory-held"
    """Bytes mapped and not unmapped by the end of the recording."""

    @property
    def column_value(self) -> str:
        """How the column `kind` of a capture's tables spells this kind."""
        return COLUMN_VALUES[self]

    @property
    def is_memory(self) -> bool:
        """Whether the kind is measured in bytes; the other kinds are measured in time."""
        return self in MEMORY_KINDS

    @classmethod
    def from_column(cls, value: str) -> ProfileKind:
        """The kind that a column value stands for. Raises KeyError for any other value."""
        return _BY_COLUMN_VALUE[value]


COLUMN_VALUES: Final = {
    ProfileKind.ON_CPU: "cpu",
    ProfileKind.OFF_CPU: "blocked",
    ProfileKind.RUN_QUEUE: "runqueue",
    ProfileKind.GPU_CALLS: "device",
    ProfileKind.GPU_TIME: "kernel",
    ProfileKind.MEMORY_MAPPED: "mapped",
    ProfileKind.MEMORY_FAULTED: "faulted",
    ProfileKind.MEMORY_HELD: "held",
}
"""Values of the column `kind` of the tables `sample`, `activity` and `span` (abi/tables.json).

They are part of the capture format and do not change. No row has the value `held`: held memory is
computed, `mapped` less `unmapped`.
"""
_BY_COLUMN_VALUE: Final = {value: kind for kind, value in COLUMN_VALUES.items()}

BASIC_KINDS: Final = (
    ProfileKind.ON_CPU,
    ProfileKind.OFF_CPU,
    ProfileKind.RUN_QUEUE,
    ProfileKind.GPU_CALLS,
)
"""The kinds that every recording observes; GPU time and memory need more than the default."""
MEMORY_KINDS: Final = (
    ProfileKind.MEMORY_MAPPED,
    ProfileKind.MEMORY_FAULTED,
    ProfileKind.MEMORY_HELD,
)


class ProfileRow(NamedTuple):
    """One stack of one thread, with its estimated weight."""

    thread: int
    """Index into `Profile.threads`."""
    stack: int
    """Index into `Profile.stacks`."""
    name: str
    """'' on a CPU; reason of a wait; function of a device call; kernel; kind of memory."""
    events: int
    """Samples, waits or calls."""
    ns: int
    """Time on a CPU, waiting, inside the call, or of the kernel on the device."""
    bytes: int
    """Bytes moved or allocated by the calls, mapped or touched."""


@dataclass(frozen=True, slots=True)
class Profile:
    """All stacks of one kind, stored by column; iterate for rows."""

    kind: ProfileKind
    stacks: Stacks
    threads: Sequence[Thread]
    names: Sequence[str]
    """Distinct ones; `row_name` has indices into them."""
    row_thread: Sequence[int]
    row_stack: Sequence[int]
    row_name: Sequence[int]
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
        """What the kind is measured in: bytes of memory, nanoseconds of anything else."""
        return self.row_bytes if self.kind.is_memory else self.row_ns

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
