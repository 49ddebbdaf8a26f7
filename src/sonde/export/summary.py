# SPDX-License-Identifier: Apache-2.0
"""The summary of a recording: some 25 to 50 lines, at most 100 columns wide.

Which code ran on CPUs, what threads waited for, which GPU API calls were made; GPU time, metrics
and memory held, where they were recorded; and what was lost.
Threads that slept all the time and waiting kernel threads are only counted. Processes that called a
device come first, then those that used CPU time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from sonde.export import metric_charts
from sonde.export.layout import (
    columns,
    duration,
    fit,
    fit_location,
    loss_line,
    one_line,
    percent,
    size,
    width_of,
)
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

CPU_ROWS = 5
WAIT_ROWS = 5
DEVICE_ROWS = 4
LOSS_ROWS = 3
MEMORY_ROWS = 4
"""Rows that are shown; of waits, calls, runs, memory and losses the others are counted."""
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
    lines += ["", *_waits(session, processes, waits)]
    lines += ["", *_device_calls(queries.device_calls(session, where))]
    if runs := device_runs(session, where):
        lines += ["", *_device_runs(runs)]
    if charts := metric_charts.summary(session, where):
        lines += ["", *charts]
    if held := _held(growth(session, where)):
        lines += ["", *held]
    lines += ["", *_lost(info, queries.losses(session))]
    lines += _stack_ends(queries.stack_ends(session))
    return "\n".join(map(one_line, lines))


def write(
    session: Session,
    out: BinaryIO,
    kinds: Sequence[ProfileKind] = BASIC_KINDS,
    where: Where = EVERYTHING,
) -> None:
    """Write the summary as UTF-8 text; it always has every kind."""
    out.write(f"{render(session, where)}\n".encode(errors="replace"))


def _headline(info: CaptureInfo, processes: ProcessRows, waits: WaitRows, scope: str) -> str:
    machine = [duration(info.duration_ns)]
    if info.cpus:
        machine.append(f"{info.cpus} CPU{'s' if info.cpus > 1 else ''}")
    at = f" at {info.hz} Hz" if info.hz else ""
    seen = (
        f"{processes.cpu_samples_in_all:,} samples{at}, "
        f"{sum(waits.events[waits.is_off_cpu].tolist()):,} waits, "
        f"{processes.device_calls_in_all:,} GPU API calls"
    )
    return f"{scope}, {', '.join(machine)}: {seen}"


def _on_cpu(
    info: CaptureInfo, processes: ProcessRows, functions: Sequence[FunctionUse]
) -> list[str]:
    busy_ns = processes.cpu_ns_in_all
    capacity_ns = info.duration_ns * info.cpus
    of_all = f" of {duration(capacity_ns)}: {percent(busy_ns, capacity_ns)}" if capacity_ns else ""
    left = columns(
        [
            (percent(use.cpu_ns, busy_ns), duration(use.cpu_ns), use.process.label)
            for use in processes[:CPU_ROWS]
            if use.cpu_ns
        ],
        (-9, -7, 24),
    )
    right = columns(
        [
            (percent(use.self_ns, busy_ns), use.function, _location(use))
            for use in functions
            if use.self_ns
        ],
        (-7, 20, _LOCATION_WIDTH),
    )
    head = fit(f"ON CPU  {duration(busy_ns)}{of_all}", _LEFT_WIDTH) + "  HOTTEST FUNCTIONS (self)"
    if not busy_ns:
        return ["ON CPU  nothing sampled"]
    return [
        head,
        *(f"{a:{_LEFT_WIDTH}}{b}".rstrip() for a, b in zip_longest(left, right, fillvalue="")),
    ]


def _location(use: FunctionUse) -> str:
    """Where a function is in the user's code, or who there calls it; else its binary."""
    place = use.location.removeprefix(f"{use.function} ")
    return fit_location(place, _LOCATION_WIDTH) if place else use.binary


@dataclass(slots=True)
class _ThreadWaits:
    """All waits of one thread."""

    thread: Thread
    blocked_ns: int = 0
    queued_ns: int = 0
    longest: Wait | None = None
    """The longest total of one reason off-CPU."""

    def add(self, wait: Wait) -> None:
        if wait.kind == ProfileKind.RUN_QUEUE:
            self.queued_ns += wait.ns
            return
        self.blocked_ns += wait.ns
        if self.longest is None or wait.ns > self.longest.ns:
            self.longest = wait

    def row(self) -> tuple[str, ...]:
        thread, wait = self.thread, self.longest
        reason = where = waker = ""
        if wait:
            share = round(100 * wait.ns / self.blocked_ns) if self.blocked_ns else 100
            reason = wait.reason if share > 99 else f"{wait.reason} {share} %"
            where = fit_location(wait.location, _WAIT_WIDTHS[3]) if wait.location else wait.hint
            waker = wait.waker
        return (
            _thread_label(thread, _WAIT_WIDTHS[0]),
            duration(self.blocked_ns),
            reason,
            where,
            waker,
            duration(self.queued_ns),
        )


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


def _waits(session: Session, processes: ProcessRows, waits: WaitRows) -> list[str]:
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
    ranked = _ranked(session, processes, waits, ~(idle | kernel | sonde))
    left_out = (
        (len(ranked) - WAIT_ROWS, "more"),
        (int(idle.sum()), "idle all the time"),
        (int(kernel.sum()), "of the kernel"),
        (int(sonde.sum()), "of Sonde"),
    )
    folded = [f"{count:,} {what}" for count, what in left_out if count > 0]
    if not len(ranked):
        lines = ["LONGEST WAITS  none"]
    else:
        rows = [_row_of(session, waits, thread) for thread in ranked[:WAIT_ROWS].tolist()]
        lines = columns([_WAIT_HEAD, *rows], _WAIT_WIDTHS)
    return [*lines, f"  threads not shown: {', '.join(folded)}"] if folded else lines


def _ranked(session: Session, processes: ProcessRows, waits: WaitRows, shown: Mask) -> Ints:
    """The threads in the mask `shown` that have waits, the most important first: of processes that
    called a device, then of active ones, then by the time that they waited."""
    ns = np.zeros(len(session.threads), np.int64)
    np.add.at(ns, waits.thread, waits.ns)
    # In the order of their longest waits, for threads that waited equally long.
    threads, first = np.unique(waits.thread[shown[waits.thread]], return_index=True)
    rank = np.full(len(session.processes), 2)
    rank[processes.process] = _ranks(session.info, processes)
    of_process = rank[session.threads.process[threads]]
    ranked: Ints = threads[np.lexsort((first, -ns[threads], of_process))]
    return ranked


def _ranks(info: CaptureInfo, processes: ProcessRows) -> Ints:
    """0 for processes that called a device, 1 for active ones, 2 for the rest."""
    least_ns = info.duration_ns * ACTIVE_SHARE
    busy_ns = np.rint(processes.cpu_ns) + np.rint(processes.runqueue_ns)
    inactive = np.where(busy_ns >= least_ns, 1, 2)
    ranks: Ints = np.where(np.rint(processes.device_calls) > 0, 0, inactive)
    return ranks


def _row_of(session: Session, waits: WaitRows, thread: int) -> tuple[str, ...]:
    found = _ThreadWaits(session.threads[thread])
    for wait in waits.chosen(np.flatnonzero(waits.thread == thread)):
        found.add(wait)
    return found.row()


_DEVICE_HEAD = ("GPU API CALLS", "", "calls", "bytes", "time", "longest", "errors")
_DEVICE_WIDTHS = (22, 22, -9, -15, -7, -7, -6)


def _device_calls(calls: Sequence[DeviceCalls]) -> list[str]:
    if not calls:
        return ["GPU API CALLS  none seen"]
    rows = [_device_row(one) for one in calls[:DEVICE_ROWS]]
    lines = columns([_DEVICE_HEAD, *rows], _DEVICE_WIDTHS)
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
    return [fit(line, 100).rstrip() for line in lines]


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
