# SPDX-License-Identifier: Apache-2.0
"""What threads waited for longest, as rows of the summary.

Threads that wait alike are one row; those that slept all the time, waiting kernel threads and those
of Sonde are only counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sonde.export.layout import columns, duration, fit, fit_location, grown, one_line, width_of
from sonde.model.answers import Wait
from sonde.model.process import Thread
from sonde.model.profile import ProfileKind
from sonde.model.wait_lengths import lengths_text
from sonde.query import queries
from sonde.query.capture import CaptureInfo
from sonde.query.process_rows import ProcessRows
from sonde.query.queries import Where
from sonde.query.session import Session
from sonde.query.wait_rows import WaitRows

Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

WIDTH = 100
"""Of a line, in cells."""
NAME_WIDTH = 38
"""Of the name of a thread, in cells, where the line has room."""
WAIT_ROWS = 5
"""Rows that are shown; other threads are counted."""
ALIKE = 200
"""Threads that are looked at for whether they wait alike."""
ASKED_WAKERS = 64
"""Of threads that wait alike, those whose wakers are looked up."""
LEAST_ENDED = 0.05
"""Part of the waits of threads that wait alike, for another thread that ended them."""
SECOND_REASON = 0.25
"""Part of a thread's waits for a second reason that is shown."""
ACTIVE_SHARE = 0.01
"""A process is active if it was on a CPU or in a run queue for this share of the recording."""
_LEAST_OF_PROGRAM = 4
"""Cells of a program's name before a thread's."""
_WAIT_HEAD = ("LONGEST WAITS", "off-CPU", "main reason", "in", "woken by", "run queue")
_WAIT_WIDTHS = (25, -7, 13, 22, 14, -9)


def longest_waits(
    session: Session, processes: ProcessRows, waits: WaitRows, where: Where
) -> tuple[list[str], dict[int, str]]:
    """(The table's lines, by number of a line the one below it on how long single waits are.)"""
    threads = len(session.threads)

    def having(rows: Mask) -> Mask:
        """Which threads have any of these waits."""
        found = np.zeros(threads, bool)
        found[waits.thread[rows]] = True
        return found

    idle, kernel = having(waits.idle & ~waits.is_kernel), having(waits.is_kernel)
    sonde = having(waits.of_sonde)
    # Not of Sonde are threads that wait in other code, too.
    of_both = np.flatnonzero(sonde[waits.thread] & ~waits.of_sonde)
    sonde[waits.thread[of_both[waits.has_hint(of_both)]]] = False
    sonde &= ~idle
    serving = having(waits.for_requests)
    serving[waits.thread[waits.is_off_cpu & ~waits.for_requests & (waits.ns > 0)]] = False
    serving &= ~(idle | kernel | sonde)
    ranked = _ranked(session, processes, waits, ~(idle | kernel | sonde | serving))
    left_out: tuple[tuple[int, str], ...] = (
        (0, "more"),
        (int(idle.sum()), "idle all the time"),
        (int(serving.sum()), "only for requests"),
        (int(kernel.sum()), "of the kernel"),
        (int(sonde.sum()), "of Sonde"),
    )
    if not len(ranked):
        lines, lengths = ["LONGEST WAITS  none"], {}
    else:
        shown, left = _alike(session, processes, waits, ranked)
        rows: list[_Row] = []
        for one in shown:
            mine = one.rows(session, waits, where)
            if len(rows) + len(mine) > WAIT_ROWS:  # second reasons take the place of threads
                left += len(one.numbers)
            else:
                rows += mine
        left_out = ((left, "more"), *left_out[1:])
        widths = grown([_WAIT_HEAD, *(row.cells for row in rows)], _WAIT_WIDTHS, WIDTH)
        below = " " * sum(abs(width) + 2 for width in widths[:2])
        cut = [(*cells[:3], fit_location(cells[3], widths[3]), *cells[4:]) for cells, _ in rows]
        lines = columns([_WAIT_HEAD, *cut], widths)
        lengths = {at: below + row.lengths for at, row in enumerate(rows, 1) if row.lengths}
    folded = [f"{count:,} {what}" for count, what in left_out if count > 0]
    lines += [f"  threads not shown: {', '.join(folded)}"] if folded else []
    return lines, lengths


class _Row(NamedTuple):
    """A row of the waits."""

    cells: tuple[str, ...]
    lengths: str = ""
    """How long single ones are: in a line below, where that is known."""


@dataclass(slots=True)
class _ThreadWaits:
    """All waits of one thread, or of several that wait alike."""

    thread: Thread
    blocked_ns: int = 0
    queued_ns: int = 0
    by_reason: dict[str, list[Wait]] = field(default_factory=dict)
    """Totals off-CPU."""
    of_reason: dict[str, list[int]] = field(default_factory=dict)
    """The threads that have these totals, as `numbers`."""
    numbers: list[int] = field(default_factory=list)
    """Of the threads, as indices in `Session.threads`."""

    def add(self, wait: Wait, number: int) -> None:
        """Adds a wait of the thread with this number."""
        if wait.kind == ProfileKind.RUN_QUEUE:
            self.queued_ns += wait.ns
            return
        self.blocked_ns += wait.ns
        self.by_reason.setdefault(wait.reason, []).append(wait)
        self.of_reason.setdefault(wait.reason, []).append(number)

    def take_in(self, other: _ThreadWaits) -> None:
        """Adds the waits of other threads that wait alike."""
        self.blocked_ns += other.blocked_ns
        self.queued_ns += other.queued_ns
        self.numbers += other.numbers
        for reason, waits in other.by_reason.items():
            self.by_reason.setdefault(reason, []).extend(waits)
            self.of_reason.setdefault(reason, []).extend(other.of_reason[reason])

    @property
    def waited_ns(self) -> int:
        """Blocked, or without a CPU."""
        return self.blocked_ns + self.queued_ns

    @property
    def reasons(self) -> list[str]:
        """By the time that they take, the main one first."""
        return sorted(self.by_reason, key=lambda reason: -self._ns(reason))

    @property
    def alike(self) -> tuple[object, ...]:
        """What threads have in common that wait alike: for the same reason in the same line of a
        program; otherwise they are shown one by one."""
        reasons = self.reasons
        at = self.by_reason[reasons[0]][0].location if reasons else ""
        return (self.thread.process, reasons[0], at) if at else (self.thread,)

    def _ns(self, reason: str) -> int:
        return sum(wait.ns for wait in self.by_reason[reason])

    def rows(self, session: Session, waits: WaitRows, where: Where) -> list[_Row]:
        """A row for the main reason, and one for a second one that is not small."""
        thread, reasons = self.thread, self.reasons
        more = f" +{len(self.numbers) - 1:,}" if len(self.numbers) > 1 else ""
        whole = width_of(f"  {one_line(thread.name)} ({thread.tid})")
        width = min(max(whole, _WAIT_WIDTHS[0] - len(more)), NAME_WIDTH + 2 - len(more))
        first = f"{_thread_label(thread, width)}{more}"
        ends = (first, duration(self.blocked_ns)), (duration(self.queued_ns),)
        if not reasons:
            return [_Row((*ends[0], "", "", "", *ends[1]))]
        cells = (*ends[0], *self._reason(session, waits, where, reasons[0]), *ends[1])
        rows = [_Row(cells, self._lengths(waits, reasons[0]))]
        if len(reasons) > 1 and self._ns(reasons[1]) >= SECOND_REASON * self.blocked_ns:
            cells = ("", "", *self._reason(session, waits, where, reasons[1]), "")
            rows.append(_Row(cells, self._lengths(waits, reasons[1])))
        return rows

    def _lengths(self, waits: WaitRows, reason: str) -> str:
        """How long the waits for a reason are."""
        count = sum(wait.count for wait in self.by_reason[reason])
        single = waits.lengths_together(self.of_reason[reason], reason)
        return lengths_text(count, self._ns(reason), single)

    def _reason(
        self, session: Session, waits: WaitRows, where: Where, reason: str
    ) -> tuple[str, str, str]:
        """(reason with its share, place, who ended the waits)"""
        longest = max(self.by_reason[reason], key=lambda wait: wait.ns)
        share = round(100 * self._ns(reason) / self.blocked_ns) if self.blocked_ns else 100
        place = longest.hint
        if longest.location:
            place = longest.location
        text = reason if share > 99 else f"{reason} {share} %"
        return text, place, self._waker(session, waits, where, reason, longest)

    def _waker(
        self, session: Session, waits: WaitRows, where: Where, reason: str, longest: Wait
    ) -> str:
        """The thread that ended the waits. Where threads wait alike they pass on what they wait
        for, so that is another one: the holder of a lock."""
        if len(self.numbers) < 2:
            return longest.waker
        ended = queries.ended_by(session, self.numbers[:ASKED_WAKERS], reason, where)
        whole = sum(ended.values())
        mine = {int(session.threads.tid[number]) for number in self.numbers}
        theirs = {tid: ns for tid, ns in ended.items() if tid not in mine}
        most = max(theirs, key=lambda tid: theirs[tid], default=0)
        if most and theirs[most] >= LEAST_ENDED * whole:
            return waits.waker(most)
        return "one another" if ended else ""


def _thread_label(thread: Thread, width: int) -> str:
    """'  process/thread (tid)'; of what is too long for `width` cells, the process is shortened
    first, then left out."""
    tid = f" ({thread.tid})"
    program, name = thread.process.name, one_line(thread.name)
    if name == program:
        return f"  {name}{tid}"
    room = width - len(tid) - 2
    left = room - width_of(name) - 1
    if width_of(program) > left:
        program = fit(program, left) if left >= _LEAST_OF_PROGRAM else ""
    name = f"{program}/{name}" if program else fit(name, room).rstrip()
    return f"  {name}{tid}"


def _ranked(session: Session, processes: ProcessRows, waits: WaitRows, shown: Mask) -> Ints:
    """The threads in the mask `shown` that have waits, the most important first: of processes that
    called a device, then of active ones, then by the time that they waited."""
    ns = np.zeros(len(session.threads), np.int64)
    np.add.at(ns, waits.thread, np.where(waits.for_requests, 0, waits.ns))
    # In the order of their longest waits, for threads that waited equally long.
    threads, first = np.unique(waits.thread[shown[waits.thread]], return_index=True)
    of_process = _rank_of_processes(session, processes)[session.threads.process[threads]]
    ranked: Ints = threads[np.lexsort((first, -ns[threads], of_process))]
    return ranked


def _rank_of_processes(session: Session, processes: ProcessRows) -> Ints:
    """The rank (`_ranks`) of each process of the session."""
    rank: Ints = np.full(len(session.processes), 2)
    rank[processes.process] = _ranks(session.info, processes)
    return rank


def _ranks(info: CaptureInfo, processes: ProcessRows) -> Ints:
    """0 for processes that called a device, 1 for active ones, 2 for the rest."""
    least_ns = info.duration_ns * ACTIVE_SHARE
    busy_ns = np.rint(processes.cpu_ns) + np.rint(processes.runqueue_ns)
    inactive = np.where(busy_ns >= least_ns, 1, 2)
    ranks: Ints = np.where(np.rint(processes.device_calls) > 0, 0, inactive)
    return ranks


def _alike(
    session: Session, processes: ProcessRows, waits: WaitRows, ranked: Ints
) -> tuple[list[_ThreadWaits], int]:
    """(the first threads, those together that wait alike, how many more there are), in the order of
    what they wait together. Only the `ALIKE` first ones are compared."""
    found: dict[tuple[object, ...], _ThreadWaits] = {}
    beyond = max(0, len(ranked) - ALIKE)
    mine = ~waits.for_requests
    for number in ranked[:ALIKE].tolist():
        one = _ThreadWaits(session.threads[number], numbers=[number])
        for wait in waits.chosen(np.flatnonzero(mine & (waits.thread == number))):
            one.add(wait, number)
        if (known := found.get(one.alike)) is not None:
            known.take_in(one)
        else:
            found[one.alike] = one
    rank = _rank_of_processes(session, processes)[session.threads.process]
    shown = sorted(found.values(), key=lambda one: (rank[one.numbers[0]], -one.waited_ns))
    beyond += sum(len(one.numbers) for one in shown[WAIT_ROWS:])
    return shown[:WAIT_ROWS], beyond
