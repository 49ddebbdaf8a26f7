# SPDX-License-Identifier: Apache-2.0
"""What every collector offers, and the rows it hands over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from sonde.metrics import MetricRow
from sonde.model.owner import GroupNote, ProcessNote
from sonde.procfs import START_UNIT_NS

if TYPE_CHECKING:
    from sonde._native import Columns

TableRow = tuple[object, ...]
"""A row in the column order of abi/tables.json."""

ProcessKey = tuple[int, int]
"""(pid, start_ns)"""


@dataclass(slots=True)
class Batch:
    """What a collector saw since its last tick."""

    rows: dict[str, list[TableRow]] = field(default_factory=dict)
    """By table: sample, activity, event."""
    metrics: list[MetricRow] = field(default_factory=list)
    """Of the table metric."""
    spans: list[Mapping[str, object]] = field(default_factory=list)
    """Parts of the table span: columns by name, ready for the encoder."""
    parts: list[tuple[str, Mapping[str, object]]] = field(default_factory=list)
    """The same of other tables: (table, columns)."""
    stacks: dict[int, ProcessKey] = field(default_factory=dict)
    """Stack ids that the rows and spans use, with the process whose addresses they hold."""
    launch_stacks: dict[int, ProcessKey] = field(default_factory=dict)
    """The same, of stacks taken in our library (collect.launch_sites): its frames are to go."""
    own_stacks: dict[int, tuple[ProcessKey, tuple[int, ...]]] = field(default_factory=dict)
    """Stack ids whose user addresses, leaf first, come with them."""
    threads: set[tuple[int, int, int]] = field(default_factory=set)
    """(pid, start_ns, tid) of every thread seen."""
    notes: list[ProcessNote] = field(default_factory=list)
    """What the kernel told of processes while they were there, in order of time."""
    group_io: dict[tuple[int, int, str, str], tuple[int, int, int, int]] = field(
        default_factory=dict
    )
    """(hierarchy, control group, device, operation) to requests, bytes, ns in queue, in device."""
    groups: list[GroupNote] = field(default_factory=list)
    """Control groups made meanwhile."""
    seen: int = 0
    """Events behind the rows, for the live count."""

    def add(self, table: str, row: TableRow) -> None:
        """Append a row to a table."""
        self.rows.setdefault(table, []).append(row)

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


class Collector(Protocol):
    """One concern of the node."""

    name: str

    def start(self) -> None:
        """Attach. Raises HostError where this machine cannot."""

    def drain(self, since_ns: int, to_the_end: bool) -> Batch:
        """Everything seen since the last call; `since_ns` (CLOCK_MONOTONIC) is when that was.

        `to_the_end`: a chunk ends here, so sum up what is still going on too.
        """

    def stop(self) -> None:
        """Detach. Rows not drained yet stay readable."""

    def pause(self) -> None:
        """Let go of what costs while something happens. Rows not drained yet stay readable."""

    def resume(self) -> None:
        """Observe again, as if started now. Raises HostError."""

    def losses(self) -> Mapping[str, int]:
        """What was lost so far, by name."""

    def memory_bytes(self) -> int:
        """Kernel memory held."""
