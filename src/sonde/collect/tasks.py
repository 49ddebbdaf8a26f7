# SPDX-License-Identifier: Apache-2.0
"""What processes use, by the kernel's own counters, and to whom they belong while they live.

Time on a CPU, time ready without one, switches, migrations, faults, bytes of block devices,
reclaim: summed over all threads of a process, those that ended in between included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from sonde import _native, procfs
from sonde.collect.attached import Scanning
from sonde.collect.collector import Batch, ProcessKey
from sonde.collect.kernel import BpfObject, Kernel, by_cpus, expect_fields, refusal
from sonde.model.owner import GroupNote, ProcessNote, step_of
from sonde.procfs import START_UNIT_NS

FIELDS = (
    *("tgid", "start_ns"),
    *("cpu_ns", "runqueue_ns", "runs", "voluntary", "involuntary", "migrations"),
    *("minor_faults", "major_faults", "read_bytes", "written_bytes"),
    *("reclaims", "reclaim_ns", "reclaimed_pages"),
)
NOTE_FIELDS = (
    *("time_ns", "tgid", "start_ns", "parent_tgid", "uid", "inner_pid", "kind"),
    *("cgroup_0", "cgroup_1", "cgroup_2", "cgroup_3"),
    *("hierarchy_0", "hierarchy_1", "hierarchy_2", "hierarchy_3"),
)
_EXEC, _EXIT = 1, 3
NOTE_KINDS = {_EXEC: "exec", 2: "moved", _EXIT: "exit"}
"""Names of `enum note_kind`."""
NOTES_A_TICK = 4_096
"""Of each kind, drained at a time; more stay in their ring."""
RECLAIM = ("on_reclaim", "on_reclaimed", "on_group_reclaim", "on_group_reclaimed")
"""Programs at direct reclaim: of the machine's memory, and of a control group's."""
LEAST_ROWS: Final = 4_096
MAX_ROWS: Final = 16_384
"""Bounds of `_room`; on a machine with more than a few CPUs the lower one is twice as high."""
FREE_SHARE: Final = 0.75
PARTY_DIVISOR: Final = 16
"""Each second anybody may begin new rows up to this share of the room, and besides each user or
container up to a sixteenth of it (bpf/share.h)."""


def _room() -> int:
    """How many processes have separate rows between two drains, including those that end; the
    others share one."""
    return min(max(2 * len(procfs.pids()), by_cpus(2 * LEAST_ROWS)), MAX_ROWS)


class TaskCollector(Scanning):
    """One row of `usage` for each process that used anything since the last tick."""

    name = "tasks"

    @staticmethod
    def bpf_object() -> BpfObject:
        """What is loaded into the kernel for it."""
        room = _room()
        shares = {
            "free_rows": int(room * FREE_SHARE),
            "most_rows_of_one_party": room // PARTY_DIVISOR,
        }
        return BpfObject("tasks", shares, max_entries={"usage": room}, takes_stacks=False)

    def __init__(self, kernel: Kernel, *, least_ns: int = 0) -> None:
        """`least_ns`: time on a CPU or ready that a row has at least; what a process used is added
        up until it has so much, at the latest until a chunk ends."""
        super().__init__(kernel.load(self.bpf_object()))
        self._least_ns = least_ns
        self._small: dict[ProcessKey, tuple[int, ...]] = {}
        """What has become no row yet, in the order of columns from `cpu_ns` on."""
        expect_fields(self._bpf, "usage", FIELDS)

    def start(self) -> None:
        """Take the counters so far as the beginning; follow exits, execs and control groups. Raises
        HostError."""
        try:
            # First: a process that ends before its exit is followed adds nothing.
            self._begin_scans()
            self._links = [
                self._bpf.attach(program)
                for program in (
                    "on_exit",
                    "on_exec",
                    "on_cgroup_attach",
                    "on_cgroup_mkdir",
                    *RECLAIM,
                )
            ]
        except OSError as error:
            raise refusal(error) from error

    def drain(self, since_ns: int, to_the_end: bool) -> Batch:
        """Rows of `usage`, and notes on processes and control groups."""
        batch = Batch()
        if self._scan is not None:
            self._run_scan()
        rows = batch.rows["usage"] = []
        for pid, start_ns, used in self._due(self._bpf.drain("usage"), to_the_end):
            cpu, ready, runs, waits, preempted, moves, minor, major, *io = used
            read, written, reclaims, reclaim_ns, pages = io
            rows.append((
                since_ns, pid, start_ns, cpu, ready, runs, waits, preempted, moves,
                minor, major, read, written, reclaims, reclaim_ns, pages,
            ))  # fmt: skip
            batch.threads.add((pid, start_ns, pid))
        batch.groups = self._groups()
        batch.notes = self._notes()
        return batch

    def _due(
        self, drained: Iterable[_native.Row], everything: bool
    ) -> Iterator[tuple[int, int, Sequence[int]]]:
        """(pid, start_ns, what it used) of what becomes a row now."""
        small = self._small
        for pid, start, *used in drained:
            key = (pid, start - start % START_UNIT_NS)
            if (before := small.pop(key, None)) is not None:
                used = [one + more for one, more in zip(before, used, strict=True)]
            if used[0] + used[1] < self._least_ns:
                small[key] = tuple(used)
            else:
                yield *key, used
        beyond = len(small) if everything else max(0, len(small) - MAX_ROWS)
        for key in list(islice(small, beyond)):  # those that used something longest ago
            yield *key, small.pop(key)

    def _groups(self) -> list[GroupNote]:
        ring = self._bpf.drain_ring("cgroup_notes", "cgroup_note", NOTES_A_TICK)
        if not len(ring):
            return []
        return [
            GroupNote(hierarchy, number, procfs.printable(path))
            for (hierarchy, number), path in zip(
                ring.rows(["hierarchy", "id"]), ring.names("path"), strict=True
            )
        ]

    def _notes(self) -> list[ProcessNote]:
        ring = self._bpf.drain_ring("process_notes", "process_note", NOTES_A_TICK)
        notes = []
        steps = self._steps()
        rows = ring.rows(list(NOTE_FIELDS))
        # Of a process that came and ended since then, only the note of its exit is used later.
        who_and_why = ring.rows(["tgid", "start_ns", "kind"])
        ends = {(pid, start) for pid, start, kind in who_and_why if kind == _EXIT}
        for time_ns, pid, start, ppid, uid, inner, kind, *groups in rows:
            if kind == _EXEC and (pid, start) in ends and not steps:
                continue
            places = {
                (hierarchy, number): None
                for number, hierarchy in zip(groups[:4], groups[4:], strict=True)
                if number
            }
            start_ns = start - start % START_UNIT_NS
            what = NOTE_KINDS.get(kind, "exec")
            step = steps.get((pid, start_ns)) if what == "exec" else None
            who = (pid, start_ns, ppid, uid, inner)
            notes.append(ProcessNote(time_ns, *who, tuple(places), what, step))
        return notes

    def _steps(self) -> dict[ProcessKey, tuple[str, str]]:
        ring = self._bpf.drain_ring("step_notes", "step_note", NOTES_A_TICK)
        if not len(ring):
            return {}
        found = {}
        for (pid, start, length), raw in zip(
            ring.rows(["tgid", "start_ns", "length"]), ring.raw("environment"), strict=True
        ):
            step = step_of(raw[:length])
            if step is not None:
                found[pid, start - start % START_UNIT_NS] = step
        return found
