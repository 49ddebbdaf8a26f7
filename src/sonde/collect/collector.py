# SPDX-License-Identifier: Apache-2.0
"""What every collector offers, and the rows it hands over."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from sonde.metrics import MetricRow
from sonde.model.owner import GroupNote, ProcessNote
from sonde.model.rows import RowLists, Rows
from sonde.procfs import START_UNIT_NS

if TYPE_CHECKING:
    from sonde._native import Columns, ProcessEvent
    from sonde.collect.mapped_files import FileKey

TableRow = tuple[object, ...]
"""A row in the column order of abi/tables.json."""

ProcessKey = tuple[int, int]
"""(pid, start_ns)"""


@dataclass(slots=True)
class Batch(RowLists):
    """What a collector saw since its last drain."""

    rows: Rows = field(default_factory=Rows)
    """By table: `add` appends to them, `records` reads them."""
    metrics: list[MetricRow] = field(default_factory=list)
    """Of the table metric."""
    spans: list[Mapping[str, object]] = field(default_factory=list)
    """Parts of the table span: columns by name, ready for the encoder."""
    parts: list[tuple[str, Mapping[str, object]]] = field(default_factory=list)
    """The same of other tables: (table, columns)."""
    stacks: dict[int, ProcessKey] = field(default_factory=dict)
    """Stack ids that the rows and spans use, with the process whose addresses they hold."""
    on_cpu: Columns | None = None
    """On-CPU samples as they came: tgid, tid, start_ns, stack_id, count; `parts` has them too."""
    launch_stacks: dict[int, ProcessKey] = field(default_factory=dict)
    """Like `stacks`, of stacks taken inside the injected library (collect.launch_sites): its frames
    are to be removed from them."""
    own_stacks: dict[int, tuple[ProcessKey, tuple[int, ...]]] = field(default_factory=dict)
    """Stacks that the kernel's map does not have: process and user addresses, leaf first, by id."""
    threads: set[tuple[int, int, int]] = field(default_factory=set)
    """(pid, start_ns, tid) of every thread seen."""
    notes: list[ProcessNote] = field(default_factory=list)
    """What the kernel reported of processes while they were there, in order of time."""
    group_io: dict[tuple[int, int, str, str], tuple[int, int, int, int]] = field(
        default_factory=dict
    )
    """(hierarchy, control group, device, operation) to requests, bytes, ns in queue, in device."""
    groups: list[GroupNote] = field(default_factory=list)
    """Control groups that were made since the last drain."""
    seen: int = 0
    """Events behind the rows, for the live count."""

    def add_who(self, records: Columns) -> None:
        """Threads and stacks of records with the fields tgid, start_ns, tid and stack_id."""
        self.threads |= {
            (pid, start - start % START_UNIT_NS, tid)
            for pid, start, tid in records.distinct(["tgid", "start_ns", "tid"])
        }
        self.stacks |= {
            stack_id: (pid, start - start % START_UNIT_NS)
            for stack_id, pid, start in records.distinct(["stack_id", "tgid", "start_ns"])
            if stack_id
        }


class ProcessEventListener(Protocol):
    """A receiver of process events."""

    def on_process_events(self, events: Sequence[ProcessEvent]) -> None:
        """Take in what processes did since the last call, in order of time."""

    def on_events_lost(self) -> None:
        """Some events were lost: whatever was concluded from events may be wrong."""

    def on_processes_unseen(self, pids: Sequence[int]) -> None:
        """Events of these processes were left out, perhaps their births: what was concluded of them
        may be wrong."""


class Collector(ABC):
    """One concern of the node.

    What is not abstract has a default, for a collector that has no such need. The agent knows
    collectors by this class alone; how to add one: docs/design/collectors.md.
    """

    name: str
    """Names its losses and what it has seen."""
    walks_stacks: bool = False
    """Whether it takes stacks. It starts before the others and is drained to warm up: processes
    that run anyway are then known to the unwinder before anything is recorded."""
    limits_stacks: bool = False
    """Whether `set_stack_divisor` has an effect."""
    reports_ongoing: bool = False
    """Whether a drain `to_the_end` sums up what has not ended, at little cost. Every drain is one
    then where rows are shown as they come."""
    needs_events_first: bool = False
    """Whether it gets process events before all others, and is called at every wake-up, without
    events too: it opens memory that is gone when its process ends."""
    can_wake: bool = False
    """Whether `arm_wakeup` has an effect."""
    left_behind: Sequence[str] = ()
    """After `stop`: messages about probes that stay on for a while."""

    @abstractmethod
    def start(self) -> None:
        """Attach. Raises HostError where this machine cannot."""

    @abstractmethod
    def drain(self, since_ns: int, to_the_end: bool) -> Batch:
        """Everything seen since the last call; `since_ns` (CLOCK_MONOTONIC) is when that was.

        `to_the_end`: a chunk ends here, so sum up what is still going on too.
        """

    def count_from_now(self, since_ns: int) -> Batch:
        """As `drain`, to the end, right before a recording begins: what goes on counts from here,
        so this takes little time. Of collectors that report it (`reports_ongoing`)."""
        return self.drain(since_ns, to_the_end=True)

    @abstractmethod
    def stop(self) -> None:
        """Detach. Rows not drained yet stay readable."""

    @abstractmethod
    def pause(self) -> None:
        """Detach whatever costs time as things happen, unless to detach costs more. Rows not
        drained yet stay readable."""

    @abstractmethod
    def resume(self) -> None:
        """Observe again, as if started now. Raises HostError."""

    @abstractmethod
    def losses(self) -> Mapping[str, int]:
        """What was lost so far, by name."""

    def memory_bytes(self) -> int:
        """Kernel memory held."""
        return 0

    # ---- process events ----------------------------------------------------------------------

    def on_process_events(self, events: Sequence[ProcessEvent]) -> None:
        """Take in what processes did since the last call, in order of time."""

    def on_events_lost(self) -> None:
        """Some events were lost: look at what is there now instead."""

    def on_processes_unseen(self, pids: Sequence[int]) -> None:
        """Events of these processes were left out: look at what they are now."""

    def ignorable_mappings(self) -> Mapping[tuple[FileKey, str], float]:
        """Files ((major, minor, inode), path) mapped since the last call in which there is nothing
        to observe, with the time (CLOCK_MONOTONIC, s) up to which that holds."""
        return {}

    def wants_mapping(self, path: str) -> bool:
        """Whether a process that maps a file of this path is to be reported in any case."""
        return False

    # ---- how often it is read ------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Whether what it observes goes on now and fills a buffer: it is drained at the shortest
        interval, and process events reach it at once."""
        return False

    @property
    def drain_within_s(self) -> float:
        """It is to be drained within as many seconds."""
        return math.inf

    @property
    def is_charged(self) -> bool:
        """Whether observing has a cost now that `charge` holds against a budget."""
        return False

    def charge(self) -> None:
        """Hold the cost so far against the budget: called between ticks that are far apart."""

    def set_interval(self, seconds: float, *, keep_last_only: bool = False) -> None:
        """Poll no more often than this; 0: as often as configured. `keep_last_only`: because nobody
        keeps rows, so that of each interval the last value alone counts."""

    def set_stack_divisor(self, divisor: int) -> None:
        """Take one stack in `divisor` of those that would be taken."""

    def arm_wakeup(self) -> int | None:
        """Have the kernel report, once, when the machine is no longer idle. Returns a descriptor
        that is readable from then until `disarm_wakeup`; None where it cannot."""
        return None

    def disarm_wakeup(self) -> None:
        """Have it report no more, and forget what it reported."""
