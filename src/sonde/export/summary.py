# SPDX-License-Identifier: Apache-2.0
"""The summary of a recording: some 25 to 55 lines, at most 100 columns wide.

Which code ran on CPUs and what threads waited for; which GPU API calls were made, where there were
any; GPU time, metrics and memory held, where they were recorded; and what was lost.
Threads that slept all the time and waiting kernel threads are only counted. Processes that called a
device come first, then those that used CPU time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from sonde.export import metric_charts
from sonde.export.layout import (
    columns,
    duration,
    fit,
    fit_location,
    grown,
    loss_line,
    one_line,
    percent,
    size,
    width_of,
)
from sonde.export.verdict import headline_or_why
from sonde.model.answers import (
    DeviceCalls,
    DeviceRuns,
    FunctionUse,
    Loss,
    MemoryGrowth,
    StackEnd,
    Wait,
)
from sonde.model.process import Thread
from sonde.model.profile import BASIC_KINDS, ProfileKind
from sonde.model.verdict import Explained
from sonde.model.wait_lengths import lengths_text
from sonde.query import queries
from sonde.query.capture import CaptureInfo
from sonde.query.device_runs import device_runs
from sonde.query.memory import growth
from sonde.query.process_rows import ProcessRows
from sonde.query.queries import EVERYTHING, Where
from sonde.query.session import Session
from sonde.query.wait_rows import WaitRows

Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

WIDTH = 100
"""Of a line, in cells."""
NAME_WIDTH = 38
"""Of the name of a thread, in cells, where the line has room."""
CPU_ROWS = 5
WAIT_ROWS = 5
LENGTH_ROWS = 4
"""Of the rows of waits, those with a line on how long single ones are: the first that have one."""
SCREEN_LINES = 25
"""A summary that fits a screen of this height has fewer of these lines, so that it still does."""
DEVICE_ROWS = 4
LOSS_ROWS = 3
MEMORY_ROWS = 4
"""Rows that are shown; of waits, calls, runs, memory and losses the others are counted."""
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

_LEFT_WIDTH = 44
_LOCATION_WIDTH = 23


def render(session: Session, where: Where = EVERYTHING) -> str:
    """The summary, without a newline at its end."""
    info = session.info
    processes = queries.processes(session, where)
    waits = queries.waits(session, where)
    functions = queries.top_functions(session, ProfileKind.ON_CPU, where, limit=CPU_ROWS)
    whole = where == EVERYTHING and info.host.get("whole_machine", True)
    lines = [_headline(info, processes, waits, "Whole machine" if whole else "Chosen processes")]
    lines += ["", *_on_cpu(info, processes, functions)]
    waited, lengths = _waits(session, processes, waits, where)
    lines += ["", *waited]
    ends = len(lines)
    if calls := queries.device_calls(session, where):
        lines += ["", *_device_calls(calls)]
    if runs := device_runs(session, where):
        lines += ["", *_device_runs(runs)]
    if charts := metric_charts.summary(session, where):
        lines += ["", *charts]
    if held := _held(growth(session, where)):
        lines += ["", *held]
    lines += ["", *_lost(info, queries.losses(session))]
    lines += _stack_ends(queries.stack_ends(session))
    room = SCREEN_LINES - len(lines)
    shown = sorted(lengths)[: LENGTH_ROWS if room < 0 else min(LENGTH_ROWS, room)]
    for number in reversed(shown):
        lines.insert(ends - len(waited) + number + 1, lengths[number])
    return "\n".join(map(one_line, lines))


def write(
    session: Session,
    out: BinaryIO,
    kinds: Sequence[ProfileKind] = BASIC_KINDS,
    where: Where = EVERYTHING,
    explained: Explained | None = None,
) -> None:
    """Write the summary as UTF-8 text, with the verdict below; it always has every kind."""
    out.write(f"{render(session, where)}\n".encode(errors="replace"))
    if explained is not None and (text := headline_or_why(explained)):
        out.write(f"\n{text}\n".encode(errors="replace"))


def _headline(info: CaptureInfo, processes: ProcessRows, waits: WaitRows, scope: str) -> str:
    machine = [duration(info.duration_ns)]
    if info.cpus:
        machine.append(f"{info.cpus} CPU{'s' if info.cpus > 1 else ''}")
    at = f" at {info.hz} Hz" if info.hz else ""
    seen = (
        f"{processes.cpu_samples_in_all:,} samples{at}, "
        f"{sum(waits.events[waits.is_off_cpu].tolist()):,} waits"
    )
    if calls := processes.device_calls_in_all:
        seen += f", {calls:,} GPU API calls"
    return f"{scope}, {', '.join(machine)}: {seen}"


def _on_cpu(
    info: CaptureInfo, processes: ProcessRows, functions: Sequence[FunctionUse]
) -> list[str]:
    busy_ns = processes.cpu_ns_in_all
    capacity_ns = info.duration_ns * info.cpus
    of_all = f" of {duration(capacity_ns)}: {percent(busy_ns, capacity_ns)}" if capacity_ns else ""
    if not busy_ns:
        return ["ON CPU  nothing sampled"]
    head = f"ON CPU  {duration(busy_ns)}{of_all}"
    used = [
        (percent(use.cpu_ns, busy_ns), duration(use.cpu_ns), use.process.label)
        for use in processes[:CPU_ROWS]
        if use.cpu_ns
    ]
    left = columns(used, (-9, -7, 24))
    width = min(_LEFT_WIDTH, max(map(width_of, (head, *left))) + 2)
    hottest = [
        (percent(use.self_ns, busy_ns), use.function, _location(use))
        for use in functions
        if use.self_ns
    ]
    sizes = grown([("", "", ""), *hottest], (-7, 20, _LOCATION_WIDTH), WIDTH - width)
    right = columns(
        [(share, name, fit_location(place, sizes[2])) for share, name, place in hottest], sizes
    )
    return [
        fit(head, width) + "  HOTTEST FUNCTIONS (self)",
        *((fit(a, width) + b).rstrip() for a, b in zip_longest(left, right, fillvalue="")),
    ]


def _location(use: FunctionUse) -> str:
    """Where a function is in the user's code, or who there calls it; else its binary."""
    place = use.location.removeprefix(f"{use.function} ")
    return place or use.binary


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


_LEAST_OF_PROGRAM = 4
"""Cells of a program's name before a thread's."""
_WAIT_HEAD = ("LONGEST WAITS", "off-CPU", "main reason", "in", "woken by", "run queue")
_WAIT_WIDTHS = (25, -7, 13, 22, 14, -9)


def _waits(
    session: Session, processes: ProcessRows, waits: WaitRows, where: Where
) -> tuple[list[str], dict[int, str]]:
    """(the lines, by number of a line the one below it on how long single waits are)."""
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


_DEVICE_HEAD = ("GPU API CALLS", "", "calls", "bytes", "time", "longest", "errors")
_DEVICE_WIDTHS = (22, 22, -9, -15, -7, -7, -6)


def _device_calls(calls: Sequence[DeviceCalls]) -> list[str]:
    rows = [_device_row(one) for one in calls[:DEVICE_ROWS]]
    lines = columns([_DEVICE_HEAD, *rows], grown([_DEVICE_HEAD, *rows], _DEVICE_WIDTHS, WIDTH))
    if more := calls[DEVICE_ROWS:]:
        errors = sum(one.errors for one in more)
        lines.append(
            f"  {len(more)} more kinds of call: {sum(one.calls for one in more):,} calls, "
            f"{duration(sum(one.ns for one in more))}, {errors:,} errors"
        )
    return lines


def _device_row(one: DeviceCalls) -> tuple[str, ...]:
    return (
        f"  {one.process.label}",
        one.function,
        f"{one.calls:,}",
        _moved(one),
        duration(one.ns) if one.is_timed else "–",
        duration(one.max_ns) if one.is_timed else "–",
        f"{one.errors:,}",
    )


_RUNS_HEAD = ("GPU TIME", "", "runs", "total", "±95 % CI", "mean", "p99")
_RUNS_WIDTHS = (44, -7, -10, -7, -8, -7, -7)


def _device_runs(runs: Sequence[DeviceRuns]) -> list[str]:
    all_ns = sum(one.ns for one in runs)
    rows = [
        (
            f"  {one.name}",
            percent(one.ns, all_ns),
            f"{one.count:,}",
            duration(one.ns),
            f"±{duration(one.error_ns)}",
            duration(round(one.mean_ns)),
            duration(one.p99_ns),
        )
        for one in runs[:DEVICE_ROWS]
    ]
    lines = columns([_RUNS_HEAD, *rows], _RUNS_WIDTHS)
    if more := runs[DEVICE_ROWS:]:
        lines.append(f"  {len(more)} more: {duration(sum(one.ns for one in more))}")
    return lines


def _held(grown: Sequence[MemoryGrowth]) -> list[str]:
    """Lines on memory held; none where memory was not recorded, or nothing grew."""
    rows = [
        (f"  {one.process.label}", size(one.bytes), "leak?" if one.is_suspect else "",
         " < ".join(one.frames))
        for one in grown[:MEMORY_ROWS]
    ]  # fmt: skip
    lines = columns([("MEMORY HELD", "", "", "mapped by"), *rows], (28, -8, 5, 0)) if rows else []
    if more := grown[MEMORY_ROWS:]:
        lines.append(f"  {len(more)} more: {size(sum(one.bytes for one in more))}")
    return [fit(line, WIDTH).rstrip() for line in lines]


def _moved(one: DeviceCalls) -> str:
    """All bytes and their directions: '4.00 GB h2d+d2h'."""
    if not one.bytes:
        return ""
    names = sorted(one.bytes, key=lambda name: -one.bytes[name])
    return f"{size(one.bytes_total)} {'+'.join(names) if all(names) else ''}".rstrip()


def directions(one: DeviceCalls) -> str:
    """Bytes by direction: '4.00 GB h2d'."""
    parts = sorted(one.bytes.items(), key=lambda item: -item[1])
    return ", ".join(f"{size(moved)} {direction}".rstrip() for direction, moved in parts)


def _stack_ends(ends: Sequence[StackEnd]) -> list[str]:
    """A line on incomplete stacks; none where all are complete."""
    total = sum(end.count for end in ends if end.kind != "note")
    short = [end for end in ends if end.kind in ("early", "first")]
    if not short:
        return []
    share = sum(end.count for end in short) / total
    most = short[0]
    rest = f", and {len(short) - 1} other reasons: --format table" if len(short) > 1 else ""
    return [
        f"STACKS  {100 * share:.1f} % of {total:,} truncated: {most.count:,} × {most.text}{rest}"
    ]


def _lost(info: CaptureInfo, losses: Sequence[Loss]) -> list[str]:
    lines = [loss_line(loss) for loss in losses]
    if not info.clean_end:
        lines.append("the recorder was killed: its last rows are not in the file")
    if len(lines) > LOSS_ROWS:
        lines[LOSS_ROWS - 1 :] = [f"and {len(lines) - LOSS_ROWS + 1} other kinds of loss"]
    return [f"LOST  {line}" for line in lines or ["nothing"]]
