# SPDX-License-Identifier: Apache-2.0
"""Tables for a terminal, one a section: the capture, processes, functions on CPUs, waits off CPUs
and for CPUs, GPU API calls, GPU time, what launched it, memory, memory that is still held, use by
the kernel's own counters, metrics, how stacks ended, and what was lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import BinaryIO, TypeVar

from sonde.export import metric_charts
from sonde.export.alike_waits import AlikeRows
from sonde.export.layout import (
    columns,
    duration,
    fit_location,
    loss_line,
    one_line,
    percent,
    rate,
    size,
    width_of,
)
from sonde.export.summary import directions
from sonde.model.answers import DeviceCalls, FunctionUse, ProcessUse, Usage
from sonde.model.profile import BASIC_KINDS, MEMORY_KINDS, ProfileKind
from sonde.query import queries
from sonde.query.device_callers import device_callers
from sonde.query.device_runs import device_runs
from sonde.query.memory import growth, memory
from sonde.query.queries import EVERYTHING, Where
from sonde.query.session import Session
from sonde.query.wait_rows import WaitRows

T = TypeVar("T")

ROWS = 30
"""Rows of each table by default."""
_LOCATION_WIDTH, _MOST_LOCATION_WIDTH = 32, 56
_LOOKED_AT = 200
"""Locations that decide on the width of their column, where all rows are shown."""
_ON_SONDE = ("probes_attached", "probe_slow")
"""Notices that show how Sonde works, not what it missed: only the JSON and the page have them."""


def write(
    session: Session,
    out: BinaryIO,
    kinds: Sequence[ProfileKind] = BASIC_KINDS,
    where: Where = EVERYTHING,
    limit: int = ROWS,
) -> None:
    """Write the tables of the kinds as UTF-8 text; `limit` 0 writes every row."""
    sections = [_capture(session), _processes(session, where, limit)]
    if ProfileKind.ON_CPU in kinds:
        sections.append(_functions(session, where, limit))
    off_cpu = [kind for kind in kinds if kind in (ProfileKind.OFF_CPU, ProfileKind.RUN_QUEUE)]
    if off_cpu:
        waits = queries.waits(session, where)
        sections += [_waits(waits, kind, limit) for kind in off_cpu]
    if calls := queries.device_calls(session, where) if ProfileKind.GPU_CALLS in kinds else []:
        sections.append(_device_calls(calls, limit))
    elif tuple(kinds) == (ProfileKind.GPU_CALLS,):
        sections.append(_device_calls([], limit))
    if ProfileKind.GPU_TIME in kinds:
        sections.append(_device_runs(session, where, limit))
        sections.append(_device_callers(session, where, limit))
    if any(kind in MEMORY_KINDS for kind in kinds):
        sections.append(_memory(session, where, limit))
        sections.append(_growth(session, where, limit))
    sections.append(_usage(session, where, limit))
    if charts := metric_charts.table(session, where, limit):
        sections.append(iter(charts))
    if ends := list(_stack_ends(session)):
        sections.append(iter(ends))
    sections.append(_losses(session))
    for number, lines in enumerate(sections):
        if number:
            out.write(b"\n")
        for line in lines:
            out.write(f"{one_line(line)}\n".encode(errors="replace"))


def _capture(session: Session) -> Iterator[str]:
    info = session.info
    began = datetime.fromtimestamp((info.start_ns + info.wall_offset_ns) / 1e9, UTC)
    yield f"{info.path}: {duration(info.duration_ns)} from {began:%Y-%m-%d %H:%M:%S} UTC"
    facts = [
        one_line(f"{name} {value}")
        for name, value in info.host.items()
        if value not in ("", None) and not isinstance(value, dict)
    ]
    yield f"{', '.join(facts)}; {info.chunks} chunks, {size(info.size_bytes)}"
    if session.hide:
        yield f"stacks: {session.hide.label}"


def _rows(
    head: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int], limit: int
) -> Iterator[str]:
    return _rows_of(rows, lambda row: row, head, widths, limit)


def _rows_of(
    items: Sequence[T],
    cells: Callable[[T], Sequence[str]],
    head: Sequence[str],
    widths: Sequence[int],
    limit: int,
) -> Iterator[str]:
    """A table with a row for each item, of which those beyond the limit are only counted."""
    if not items:
        yield f"{head[0]}  none"
        return
    shown = items[:limit] if limit else items
    yield from columns([head, *map(cells, shown)], widths)
    if len(shown) < len(items):
        yield f"… {len(items) - len(shown):,} more: --limit 0 shows all"


def _processes(session: Session, where: Where, limit: int) -> Iterator[str]:
    uses = queries.processes(session, where)
    busy_ns = uses.cpu_ns_in_all
    has_calls = uses.device_calls_in_all > 0

    def cells(use: ProcessUse) -> tuple[str, ...]:
        calls = (f"{use.device_calls:,}", duration(use.device_ns)) if has_calls else ()
        return (
            use.process.label,
            f"{use.threads:,}",
            percent(use.cpu_ns, busy_ns),
            duration(use.cpu_ns),
            duration(use.blocked_ns),
            duration(use.runqueue_ns),
            *calls,
            use.process.owner.label,
        )

    of_calls = ("calls", "in calls") if has_calls else ()
    widths = (28, -7, -7, -7, -7, -9, *((-9, -7) if has_calls else ()), 0)
    head = ("PROCESSES", "threads", "CPU", "on CPU", "off-CPU", "run queue", *of_calls, "owner")
    return _rows_of(uses, cells, head, widths, limit)


def _usage(session: Session, where: Where, limit: int) -> Iterator[str]:
    def cells(use: Usage) -> tuple[str, ...]:
        return (
            use.process.label,
            duration(use.cpu_ns),
            duration(use.runqueue_ns),
            f"{use.voluntary:,}",
            f"{use.involuntary:,}",
            f"{use.migrations:,}",
            f"{use.major_faults:,}",
            size(use.read_bytes),
            size(use.written_bytes),
            duration(use.reclaim_ns),
            use.process.owner.label,
        )

    head = (
        *("USAGE", "on CPU", "run queue", "waits", "preempted", "migrated", "major faults"),
        *("read", "written", "reclaim", "owner"),
    )
    widths = (28, -7, -9, -9, -9, -8, -12, -8, -8, -7, 0)
    return _rows_of(queries.usage(session, where), cells, head, widths, limit)


def _functions(session: Session, where: Where, limit: int) -> Iterator[str]:
    uses = queries.top_functions(session, ProfileKind.ON_CPU, where)
    all_ns = uses.self_ns_in_all
    has_python = uses.has_locations
    width = _location_width([use.location for use in uses[: limit or _LOOKED_AT]])

    def cells(use: FunctionUse) -> tuple[str, ...]:
        return (
            percent(use.self_ns, all_ns),
            duration(use.self_ns),
            percent(use.total_ns, all_ns),
            duration(use.total_ns),
            *((fit_location(use.location, width),) if has_python else ()),
            _with_binary(use),
        )

    head = ("ON CPU", "self", "", "total", *(("in",) if has_python else ()), "function")
    widths = (-7, -7, -7, -7, *((width,) if has_python else ()), 0)
    yield from _rows_of(uses, cells, head, widths, limit)
    nameless = next((use for use in uses[: limit or _LOOKED_AT] if _is_nameless(use)), None)
    if nameless is not None:
        yield (
            f"{nameless.function}: all code without names of that file; "
            "its total has every stack that passes through it, as at the start of a thread"
        )


def _is_nameless(use: FunctionUse) -> bool:
    """Whether it stands for all functions without a name of a file."""
    return use.function == f"[{use.binary.strip('[]')}]" and use.total_ns > use.self_ns


def _location_width(locations: Sequence[str]) -> int:
    """Of the column of these locations: as wide as they need, between two bounds."""
    needed = max(map(width_of, locations), default=0)
    return min(max(_LOCATION_WIDTH, needed), _MOST_LOCATION_WIDTH)


def _with_binary(use: FunctionUse) -> str:
    """A function and its binary: 'memcpy [libc.so.6]'; of Python the name alone."""
    if use.binary == "[python]" or use.function.strip("[]") == use.binary.strip("[]"):
        return use.function
    return f"{use.function} [{use.binary.strip('[]')}]"


def _waits(every: WaitRows, kind: ProfileKind, limit: int) -> Iterator[str]:
    found = AlikeRows(every, kind)

    def cells(number: int) -> tuple[str, ...]:
        row = found.at(number)
        wait = row.first
        reason = wait.reason
        if wait.system_call not in ("", reason):
            reason += f", {wait.system_call}"
        return (
            f"{wait.thread.name} ({wait.thread.tid}){f' +{row.threads - 1:,}' * (row.threads > 1)}",
            duration(row.ns),
            f"{row.waits:,}",
            duration(row.max_ns),
            reason,
            row.waker,
            f"{wait.place}{' (idle)' * row.is_idle}".lstrip(),
        )

    title = "OFF-CPU" if kind == ProfileKind.OFF_CPU else "RUN QUEUE"
    head = (title, "total", "waits", "longest", "reason", "woken by", "in")
    return _rows_of(range(len(found)), cells, head, (24, -7, -9, -7, 22, 22, 0), limit)


def _device_calls(calls: Sequence[DeviceCalls], limit: int) -> Iterator[str]:
    rows = [
        (
            call.process.label,
            f"{call.calls:,}",
            duration(call.ns) if call.is_timed else "–",
            duration(call.max_ns) if call.is_timed else "–",
            f"{call.errors:,}",
            directions(call),
            call.api,
            call.function,
        )
        for call in calls
    ]
    head = ("GPU API CALLS", "calls", "time", "longest", "errors", "bytes", "API", "function")
    return _rows(head, rows, (24, -9, -7, -7, -6, -13, 12, 0), limit)


def _device_runs(session: Session, where: Where, limit: int) -> Iterator[str]:
    runs = device_runs(session, where)
    all_ns = sum(run.ns for run in runs)
    rows = [
        (
            run.process.label,
            f"{run.count:,}",
            percent(run.ns, all_ns),
            duration(run.ns),
            f"±{duration(run.error_ns)}",
            duration(round(run.mean_ns)),
            duration(run.p50_ns),
            duration(run.p99_ns),
            rate(run.bytes, run.ns) if run.kind == "copy" else "",
            f"{run.timed:,}",
            run.name,
        )
        for run in runs
    ]
    head = ("GPU TIME", "runs", "", "total", "±95 % CI", "mean", "p50", "p99", "", "timed", "name")
    return _rows(head, rows, (24, -9, -7, -7, -8, -7, -7, -7, -10, -7, 0), limit)


def _device_callers(session: Session, where: Where, limit: int) -> Iterator[str]:
    rows = [
        (
            it.process.label,
            f"{100 * it.share:.1f} %",
            f"±{100 * it.share_error:.1f}",
            duration(it.ns),
            f"{it.count:,}",
            f"{it.timed:,}",
            f"{it.function}  {it.file or it.binary}".rstrip(),
        )
        for it in device_callers(session, where)
    ]
    head = ("LAUNCHED BY", "", "±95 % CI", "total", "runs", "timed", "function")
    return _rows(head, rows, (24, -7, -6, -7, -9, -7, 0), limit)


def _memory(session: Session, where: Where, limit: int) -> Iterator[str]:
    rows = [
        (
            use.process.label,
            size(use.mapped_bytes),
            size(use.unmapped_bytes),
            size(use.reserved_bytes),
            size(use.faulted_bytes),
            f"{use.faults:,}",
        )
        for use in memory(session, where)
    ]
    head = ("MEMORY", "mapped", "unmapped", "reserved", "faulted", "faults")
    return _rows(head, rows, (28, -8, -8, -8, -8, -11), limit)


def _growth(session: Session, where: Where, limit: int) -> Iterator[str]:
    rows = [
        (
            it.process.label,
            size(it.bytes),
            size(it.mapped_bytes),
            size(it.unmapped_bytes),
            f"{it.grew} of {it.windows}",
            "leak?" if it.is_suspect else "",
            " < ".join(it.frames),
        )
        for it in growth(session, where)
    ]
    head = ("HELD AT THE END", "held", "mapped", "unmapped", "grew in", "", "by")
    return _rows(head, rows, (28, -8, -8, -8, -8, 5, 0), limit)


def _stack_ends(session: Session) -> Iterator[str]:
    """How stack unwinding ended, and the memory of the unwind tables in the kernel."""
    ends = queries.stack_ends(session)
    if not ends:
        return
    total = sum(end.count for end in ends if end.kind != "note")
    rows = [(f"{end.count:,}", percent(end.count, total), end.kind, end.text) for end in ends]
    yield from _rows(("STACK ENDS", "", "", "reason"), rows, (-10, -7, 6, 0), 0)
    greatest = {use.series: use.max for use in queries.metrics(session) if not use.labels}
    maps, tables = (
        greatest.get(f"sonde.{name}", 0.0)
        for name in ("agent.kernel_map_bytes", "unwind.table_bytes")
    )
    if maps:
        yield f"BPF maps {size(maps)} at most, of which unwind tables {size(tables)}"


def _losses(session: Session) -> Iterator[str]:
    lines = [f"LOST  {loss_line(loss)}" for loss in queries.losses(session)]
    if not session.info.clean_end:
        lines.append("LOST  the recorder was killed: its last rows are not in the file")
    yield from lines or ["LOST  nothing"]
    for notice in queries.notices(session):
        if notice.name in _ON_SONDE:
            continue
        where = f" {notice.process}" if notice.process else ""
        yield one_line(f"NOTICE  {notice.count:,} × {notice.name}{where}: {notice.text}")
