# SPDX-License-Identifier: Apache-2.0
"""The summary of a recording: some 25 to 55 lines, at most 100 columns wide.

Which code ran on CPUs and what threads waited for; which GPU API calls were made, where there were
any; GPU time, metrics and memory held, where they were recorded; and what was lost.
Threads that slept all the time and waiting kernel threads are only counted. Processes that called a
device come first, then those that used CPU time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import BinaryIO

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
from sonde.export.longest_waits import WIDTH, longest_waits
from sonde.export.verdict import headline_or_why
from sonde.model.answers import (
    DeviceCalls,
    DeviceRuns,
    FunctionUse,
    Loss,
    MemoryGrowth,
    StackEnd,
)
from sonde.model.profile import BASIC_KINDS, ProfileKind
from sonde.model.verdict import Explained
from sonde.query import queries
from sonde.query.capture import CaptureInfo
from sonde.query.device_runs import device_runs
from sonde.query.memory import growth
from sonde.query.process_rows import ProcessRows
from sonde.query.queries import EVERYTHING, Where
from sonde.query.session import Session
from sonde.query.wait_rows import WaitRows

CPU_ROWS = 5
LENGTH_ROWS = 4
"""Of the rows of waits, those with a line on how long single ones are: the first that have one."""
SCREEN_LINES = 25
"""A summary that fits a screen of this height has fewer of these lines, so that it still does."""
DEVICE_ROWS = 4
LOSS_ROWS = 3
MEMORY_ROWS = 4
"""Rows that are shown; of calls, runs, memory and losses the others are counted."""

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
    waited, lengths = longest_waits(session, processes, waits, where)
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
