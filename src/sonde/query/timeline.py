# SPDX-License-Identifier: Apache-2.0
"""A capture as a timeline: single waits and calls, runs on devices, CPU samples, counters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.collectives import is_collective
from sonde.model.devices import index_of
from sonde.model.distinct_rows import distinct_rows
from sonde.model.interner import Interner
from sonde.model.libraries import GIL_FRAMES
from sonde.model.other_threads import no_other_threads
from sonde.model.timeline import (
    I64,
    Activity,
    CallKind,
    DeviceKind,
    Events,
    Mask,
    Samples,
    Scheduling,
    StateKind,
    Timeline,
    WaitDetail,
    events,
    no_events,
)
from sonde.query.capture import Capture, CaptureInfo, engine_bytes
from sonde.query.chosen_threads import chosen_threads
from sonde.query.columns import Frames, ThreadTracks, blocks_of, codes_of, int64_column, names_of
from sonde.query.device_counters import (
    device_counters,
    device_ids,
    gpus_of_processes,
    sharing,
    uses_of_processes,
)
from sonde.query.device_kinds import CALL_KIND_OF_OPERATION, CALL_KIND_OF_RUN, DIRECTIONS
from sonde.query.device_times import times_on_device
from sonde.query.kernel_threads import kernel_threads
from sonde.query.location_callees import callees_of
from sonde.query.location_callers import callers_of
from sonde.query.lock_places import places_within
from sonde.query.peers import clients_of, peers_of
from sonde.query.pools import with_pools
from sonde.query.run_totals import single_runs
from sonde.query.sample_totals import FAULT_FRAMES
from sonde.query.stack_roles import NUMBER_OF
from sonde.query.thread_owners import set_owners
from sonde.query.thread_totals import totals_of
from sonde.query.timed_windows import SINGLE, window_of, windows_ns
from sonde.query.traced_requests import slowest_requests
from sonde.query.validation import frame_count
from sonde.query.wait_groups import single_waits_of

_DIRECTIONS = {name: int(code) for name, code in DIRECTIONS.items()}
_CALL_KIND_OF_RUN = {kind: int(code) for kind, code in CALL_KIND_OF_RUN.items()}
_CALL_KIND_OF_OPERATION = {op: int(code) for op, code in CALL_KIND_OF_OPERATION.items()}
_DEVICE_KINDS = {"copy": DeviceKind.COPY, "set": DeviceKind.SET}
_ROW_BYTES = {"sample": 448, "activity": 512, "span": 320, "device_run": 512, "metric": 256}
"""Memory for a row of each table, until the timeline is analyzed."""
_FRAME_BYTES = 64
"""Memory for a frame in a stack."""
_TICK_NS = 1_000_000_000
"""The recorder's tick, where samples do not show it."""
NEARLY_ALL = 0.8
"""Of the time of waits with a stack, by which those without one are taken for the same."""
OTHER_ON_CPU = "other_on_cpu"
"""Name of the events with the CPU time of processes that were not recorded."""
NICE, CPUS_ALLOWED = "nice", "cpus_allowed"
"""Names of the events with how the kernel gives a chosen process CPUs."""
MOST_SCHEDULED, MOST_CPUS = 4_096, 1 << 20
"""Processes with such events, and CPUs in one, that are read."""
MOST_OTHERS = 64
"""Of them, that are read."""
_MOST_NS = 2**62
_LOST = ("device_time.lost_ring", "device_time.lost_pool", "device_time.lost_order")
"""Losses of timed runs, whose weight is added to later ones."""


def of_capture(capture: Capture, *, chosen: bool = False) -> Timeline:
    """The timeline of a capture, on its own clock (CLOCK_MONOTONIC).

    `chosen`: of a capture of very many threads, those alone that a verdict can be about
    (`chosen_threads`).
    """
    naming = Interner()
    tables, others, note = {**capture.tables}, no_other_threads(), ""
    if chosen:
        some = chosen_threads(tables)
        tables, others, note = {**some.tables}, some.others, some.note
        del some
    if capture.budget is not None:
        # The SQL engine is not used here.
        capture.budget.hold(-engine_bytes(capture.budget.limit_bytes))
        capture.budget.hold(_FRAME_BYTES * frame_count(tables["stack"]))
        capture.budget.hold(sum(size * tables[name].num_rows for name, size in _ROW_BYTES.items()))
    tracks = ThreadTracks(naming, tables, kernel_threads(tables["event"]))
    frames = Frames(tables)
    del tables["stack"]  # of the chosen threads alone: a good part of all memory
    spans = tables["span"]
    kinds = spans.column("kind")
    blocked, runqueue = pc.equal(kinds, "blocked"), pc.equal(kinds, "runqueue")
    calls = _calls(naming, tracks, spans.filter(pc.equal(kinds, "device")))
    waits = pc.equal(tables["device_run"].column("kind").cast(pa.string()), "sync")
    run = tables["device_run"].filter(pc.invert(waits))
    tick_ns = _tick(tables["sample"])
    window = window_of(run, _lossy(tables["event"], tick_ns))
    all_timed = window != SINGLE
    traced = run.filter(pa.array(all_timed))
    singly = run.filter(pa.array(~all_timed))
    times = times_on_device(traced)
    gpus = gpus_of_processes(tables["metric"])
    device, launches = _device(naming, tracks, traced, times, gpus)
    span = (capture.info.start_ns, capture.info.end_ns)
    uses = uses_of_processes(tables["metric"])
    shared = sharing(uses, gpus)
    totals = totals_of(tracks, frames, tables, singly, span=span, tick_ns=tick_ns, shared=shared)
    pids = [one.pid for one in naming.tracks]
    totals, pools = with_pools(tracks, frames, tables["sample"], totals, pids)
    requests, requests_in_all = slowest_requests(frames, tables)
    callers, thread_callers = callers_of(tracks, frames, tables["sample"])
    chosen_singly = single_runs(naming, tracks, singly, shared=shared)
    set_owners(naming, tracks, frames, tables["sample"], span[1] - span[0])
    if len(device) and not (calls.kind == CallKind.SYNC).any():
        calls = _joined(calls, _waits(naming, tracks, tables["device_run"].filter(waits)))
    states = _states(naming, tracks, frames, spans.filter(pc.or_(blocked, runqueue)))
    single_waits, tcp_waits = single_waits_of(tracks, frames, spans.filter(blocked))
    return Timeline(
        names=naming.names,
        tracks=naming.tracks,
        device=device,
        calls=_joined(calls, launches),
        windows_ns=windows_ns(traced, window[all_timed], *times),
        states=states,
        samples=_samples(naming, tracks, frames, tables["sample"]),
        counters=device_counters(tables["metric"]),
        device_ids=device_ids(tables["metric"]),
        gpus_of=gpus,
        parents=_parents(tables["process"]),
        programs=_programs(tables["process"]),
        cpus=capture.info.cpus,
        scheduling=_scheduling(tables["event"]),
        whole_machine=capture.info.host.get("whole_machine") is not False,
        recorder=_recorder(capture.info.host),
        others_on_cpu=_others_on_cpu(tables["event"]),
        busy_of=uses,
        totals=totals,
        other_threads=others,
        single_runs=chosen_singly,
        callers=callers,
        thread_callers=thread_callers,
        callees=callees_of(frames, tables["sample"]),
        peers=peers_of(tracks, tables["activity"]),
        clients=clients_of(tracks, tables["activity"]),
        single_waits=single_waits,
        tcp_waits=tcp_waits,
        written_bytes=_written_bytes(tables["usage"]),
        pools=pools,
        requests=requests,
        requests_in_all=requests_in_all,
        within=places_within(frames, tables["sample"], totals),
        timed_ns=_timed(singly, traced, tables, capture.info.start_ns),
        extent_ns=span,
        wall_offset_ns=capture.info.wall_offset_ns,
        tick_ns=tick_ns,
        sources=("sonde",),
        notes=tuple(filter(None, (note, _unread(capture.info)))),
    )


def _device(
    naming: Interner,
    tracks: ThreadTracks,
    rows: pa.Table,
    times: tuple[I64, I64],
    gpus: Mapping[int, Sequence[int]],
) -> tuple[Events, Events]:
    """(runs on the device, for each the call that launched it).

    Such a call is made up from the run: it has its thread and no length, and is at the time of the
    launch where that is known (`device_times`), else at the start of the run.
    """
    if not rows.num_rows:
        return no_events(), no_events()
    keys = [int64_column(rows, name) for name in ("pid", "device", "stream")]
    different, inverse = distinct_rows(keys)
    ordinals: dict[int, list[int]] = {}
    for pid, one, _ in different.tolist():
        ordinals.setdefault(pid, []).append(one)
    index = {pid: index_of(gpus.get(pid, ()), used) for pid, used in ordinals.items()}
    stream_of = np.array(
        [naming.stream(index[pid][one], stream, pid) for pid, one, stream in different.tolist()],
        np.int32,
    )
    ids = np.arange(1, rows.num_rows + 1)
    enqueued = int64_column(rows, "start_time_ns")
    kind = codes_of(rows, "kind", {kind: int(code) for kind, code in _DEVICE_KINDS.items()})
    names = rows.column("name").combine_chunks()
    of_name = np.array([*map(is_collective, names.dictionary.to_pylist()), False])
    collective = of_name[names.indices.to_numpy()]
    ran = events(
        start_ns=times[0],
        end_ns=times[1],
        kind=np.where((kind == DeviceKind.KERNEL) & collective, DeviceKind.COLLECTIVE, kind),
        name=names_of(naming, rows, "name"),
        track=stream_of[inverse],
        correlation=ids,
        bytes=int64_column(rows, "bytes"),
        blocks=blocks_of(rows),
        direction=codes_of(rows, "direction", _DIRECTIONS),
    )
    launches = events(
        start_ns=enqueued,
        end_ns=enqueued,
        kind=codes_of(rows, "kind", _CALL_KIND_OF_RUN),
        name=names_of(naming, rows, "name"),
        track=tracks.of_rows(rows),
        correlation=ids,
    )
    return ran, launches


def _waits(naming: Interner, tracks: ThreadTracks, rows: pa.Table) -> Events:
    """Waits for the device, as the host timed them."""
    return events(
        start_ns=int64_column(rows, "start_time_ns"),
        end_ns=int64_column(rows, "end_time_ns"),
        kind=np.full(rows.num_rows, CallKind.SYNC, np.uint8),
        name=names_of(naming, rows, "name"),
        track=tracks.of_rows(rows),
    )


def _programs(process: pa.Table) -> dict[int, tuple[str, ...]]:
    columns = (process.column(name).to_pylist() for name in ("pid", "comm", "exe"))
    return {pid: (comm, exe) for pid, comm, exe in zip(*columns, strict=True)}


def _unread(info: CaptureInfo) -> str:
    """A note on what of the file was not read; '' where all of it was."""
    parts = []
    if info.tail_bytes:
        parts.append(f"{info.tail_bytes:,} bytes of an unfinished chunk at its end")
    if info.chunks_damaged:
        parts.append(f"{info.chunks_damaged} damaged parts ({info.damaged_bytes:,} bytes)")
    if info.chunks_missing:
        parts.append(f"{info.chunks_missing} chunks that are missing")
    if not parts:
        return ""
    return f"the capture is incomplete: left out are {', '.join(parts)}"


def _recorder(host: Mapping[str, Any]) -> int:
    found = host.get("recorder", 0)
    return found if host.get("whole_machine") is True and isinstance(found, int) else 0


def _parents(process: pa.Table) -> dict[int, int]:
    """The parent of each process."""
    pids, parents = (process.column(name).to_pylist() for name in ("pid", "ppid"))
    return dict(zip(pids, parents, strict=True))


def _written_bytes(usage: pa.Table) -> dict[int, int]:
    pids, of_row = np.unique(int64_column(usage, "pid"), return_inverse=True)
    sums = np.bincount(of_row, int64_column(usage, "written_bytes"), len(pids))
    return {pid: int(min(size, _MOST_NS)) for pid, size in zip(pids.tolist(), sums, strict=True)}


def _others_on_cpu(event: pa.Table) -> list[tuple[str, int]]:
    """Who had the CPUs beside the processes that were recorded, the most first; the last rows of
    each count, as an agent writes them when it stops."""
    rows = event.filter(pc.equal(event.column("name").cast(pa.string()), OTHER_ON_CPU))
    found: dict[str, int] = {}
    for text, value in zip(
        rows.column("text").to_pylist(), rows.column("value").to_pylist(), strict=True
    ):
        if value > 0 and math.isfinite(value) and (text in found or len(found) < MOST_OTHERS):
            found[text] = int(min(value, _MOST_NS))
    return sorted(found.items(), key=lambda item: -item[1])


def _scheduling(event: pa.Table) -> dict[int, Scheduling]:
    """How the kernel gives the chosen processes CPUs; the last rows of each count."""
    found: dict[int, Scheduling] = {}
    names = event.column("name").cast(pa.string())
    rows = event.filter(pc.is_in(names, pa.array([NICE, CPUS_ALLOWED])))
    columns = ("pid", "name", "value")
    for pid, name, value in zip(*(rows.column(one).to_pylist() for one in columns), strict=True):
        if not math.isfinite(value) or not (pid in found or len(found) < MOST_SCHEDULED):
            continue
        known = found.get(pid, Scheduling())
        if name == NICE:
            found[pid] = replace(known, nice=int(min(max(value, -20), 19)))
        else:
            found[pid] = replace(known, cpus=int(min(max(value, 0), MOST_CPUS)))
    return found


def _timed(
    rows: pa.Table, traced: pa.Table, tables: Mapping[str, pa.Table], start_ns: int
) -> tuple[int, int] | None:
    """(start, end) of the time in which single runs were sampled; None for fewer than two runs.

    It ends one mean interval after the last run. It starts when the injected library started to
    count runs, by its event `timing`; in a capture without such events, at the first wait of the
    host for the device. Processes that have `traced` windows are left out of that. An event of
    before the capture is of an earlier recording where the process has one of this one, too: the
    library holds the time when it last started.
    """
    if rows.num_rows < 2:
        return None
    start = int64_column(rows, "start_time_ns")
    first, last = int(start.min()), int(start.max())
    last += (last - first) // (rows.num_rows - 1)
    pids = pc.unique(rows.column("pid"))
    mine = pids.filter(pc.invert(pc.is_in(pids, pc.unique(traced.column("pid")))))
    began = _rows_of(tables["event"], "timing", mine)
    times = int64_column(began, "time_ns")
    if began.num_rows:
        times = times[~_is_outdated(times, int64_column(began, "pid"), start_ns)]
    else:
        times = int64_column(_rows_of(tables["device_run"], "sync", mine), "start_time_ns")
    return min([first, *np.maximum(times, start_ns).tolist()]), last


def _is_outdated(times: I64, pids: I64, start_ns: int) -> Mask:
    """Which starts lie before `start_ns`, of processes that started again after it."""
    restarted = np.unique(pids[times >= start_ns])
    outdated: Mask = (times < start_ns) & np.isin(pids, restarted)
    return outdated


def _rows_of(table: pa.Table, kind: str, pids: pa.Array) -> pa.Table:
    """Rows of a kind and of the processes `pids`."""
    kinds = pc.equal(table.column("kind").cast(pa.string()), kind)
    return table.filter(pc.and_(kinds, pc.is_in(table.column("pid"), pids)))


def _lossy(event: pa.Table, tick_ns: int) -> list[tuple[int, int]]:
    """Intervals in which timed runs were lost: the tick before each such loss, and a tenth of one,
    since ticks may be late."""
    lost = pc.and_(
        pc.equal(event.column("kind").cast(pa.string()), "loss"),
        pc.is_in(event.column("name").cast(pa.string()), pa.array(_LOST)),
    )
    times = np.unique(int64_column(event.filter(lost), "time_ns")).tolist()
    return [(time_ns - tick_ns - tick_ns // 10, time_ns) for time_ns in times]


def _calls(naming: Interner, tracks: ThreadTracks, rows: pa.Table) -> Events:
    # cudaStreamWaitEvent makes a stream wait, not the thread that calls it.
    waits = pc.match_substring(rows.column("name").cast(pa.string()), "StreamWaitEvent")
    kind = codes_of(rows, "op", _CALL_KIND_OF_OPERATION)
    kind[waits.to_numpy()] = CallKind.EVENT
    return events(
        start_ns=int64_column(rows, "start_time_ns"),
        end_ns=int64_column(rows, "end_time_ns"),
        kind=kind,
        name=names_of(naming, rows, "name"),
        track=tracks.of_rows(rows),
        bytes=int64_column(rows, "bytes"),
        direction=codes_of(rows, "direction", _DIRECTIONS),
    )


def _joined(calls: Events, more: Events) -> Events:
    """The events of both."""
    if not len(more):
        return calls
    columns = {
        name: np.concatenate([getattr(calls, name), getattr(more, name)])
        for name in Events.__slots__
    }
    return events(**columns)


def _states(naming: Interner, tracks: ThreadTracks, frames: Frames, rows: pa.Table) -> Events:
    kind = codes_of(rows, "kind", {"runqueue": int(StateKind.RUNQUEUE)})
    stacks = rows.column("stack_id")
    roles, row = frames.roles, frames.row_of(stacks)
    gil = frames.holding(stacks, GIL_FRAMES) | roles.in_interpreter[row]
    loads = roles.activity[row] == NUMBER_OF[Activity.INPUT]
    details = (WaitDetail.ROOM, WaitDetail.INPUT, WaitDetail.GIL, WaitDetail.COMMUNICATION)
    conditions = [roles.for_room[row], loads, gil, roles.communicates[row], roles.in_queue[row]]
    start_ns, end_ns = int64_column(rows, "start_time_ns"), int64_column(rows, "end_time_ns")
    name, track = names_of(naming, rows, "name"), tracks.of_rows(rows)
    detail = np.select(conditions, (*details, WaitDetail.QUEUE), 0).astype(np.uint8)
    # A wait for a CPU has no stack and no detail.
    alike = (track.astype(np.int64) << 34) | (name.astype(np.int64) << 2) | kind.astype(np.int64)
    has_stack = int64_column(rows, "stack_id") != 0
    return events(
        start_ns=start_ns,
        end_ns=end_ns,
        kind=kind,
        name=name,
        track=track,
        waker=tracks.wakers(rows),
        wait_detail=_by_those_alike(detail, alike, end_ns - start_ns, has_stack),
    )


def _by_those_alike(
    detail: npt.NDArray[np.uint8], alike: I64, ns: I64, has_stack: Mask
) -> npt.NDArray[np.uint8]:
    """The details of single waits, where those without a stack, since only some are taken, are what
    nearly all others of their thread and reason are. `alike`: the same number for these; all of
    shape (waits,)."""
    _, of = np.unique(alike, return_inverse=True)
    by_detail = np.zeros((int(of.max(initial=-1)) + 1, len(WaitDetail)))
    np.add.at(by_detail, (of[has_stack], detail[has_stack]), ns[has_stack])
    most = by_detail.argmax(1)
    sure = by_detail.max(1, initial=0) > NEARLY_ALL * by_detail.sum(1)
    inherits = ~has_stack & sure[of]
    found: npt.NDArray[np.uint8] = np.where(inherits, most[of], detail).astype(np.uint8)
    return found


def _samples(naming: Interner, tracks: ThreadTracks, frames: Frames, table: pa.Table) -> Samples:
    rows = table.filter(pc.equal(table.column("kind"), "cpu"))
    return Samples(
        time_ns=int64_column(rows, "time_ns"),
        track=tracks.of_rows(rows),
        weight_ns=rows.column("weight_ns").to_numpy().astype(np.int64),
        name=frames.functions(naming, rows.column("stack_id")),
        fault=frames.holding(rows.column("stack_id"), FAULT_FRAMES),
    )


def _tick(sample: pa.Table) -> int:
    """The interval that samples are summed over, in ns: the median distance of their times."""
    times = np.unique(int64_column(sample, "time_ns"))
    return int(np.median(np.diff(times))) if len(times) > 2 else _TICK_NS
