# SPDX-License-Identifier: Apache-2.0
"""A capture as a timeline: its single waits and calls, and what its CPU samples tell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.collectives import is_collective
from sonde.model.devices import index_of
from sonde.model.timeline import (
    I32,
    I64,
    U8,
    CallKind,
    DeviceKind,
    Events,
    Hold,
    Mask,
    Naming,
    Samples,
    StateKind,
    Timeline,
    Total,
    Way,
    events,
    no_events,
)
from sonde.query.capture import Capture
from sonde.query.device_counters import (
    device_counters,
    device_ids,
    gpus_of_processes,
)
from sonde.query.device_layout import laid_out
from sonde.query.stretches import APART, window_of, windows_ns

_WAYS = {"h2d": Way.H2D, "d2h": Way.D2H, "d2d": Way.D2D, "h2h": Way.H2H, "p2p": Way.P2P}
_CALLS = {
    "launch": CallKind.LAUNCH,
    "graph-launch": CallKind.GRAPH_LAUNCH,
    "copy": CallKind.COPY,
    "map": CallKind.COPY,
    "unmap": CallKind.COPY,
    "prefetch": CallKind.COPY,
    "set": CallKind.SET,
    "sync": CallKind.SYNC,
    "alloc": CallKind.ALLOC,
    "free": CallKind.FREE,
    "pin": CallKind.PIN,
    "unpin": CallKind.PIN,
    "build": CallKind.BUILD,
}
_FAULT_FRAMES = (
    *("exc_page_fault", "asm_exc_page_fault", "handle_mm_fault", "do_user_addr_fault"),
    *("munmap", "__x64_sys_munmap", "__arm64_sys_munmap", "__vm_munmap", "do_vmi_munmap"),
    *("unmap_region", "unmap_vmas", "shmem_evict_inode"),
)
"""Memory is made for the program, or taken back: both is what new mappings cost."""
_GIL_FRAMES = ("take_gil", "PyEval_RestoreThread", "PyGILState_Ensure")
_DEVICE_KINDS = {"copy": DeviceKind.COPY, "set": DeviceKind.SET}
_ASKED = {
    "kernel": CallKind.LAUNCH,
    "replay": CallKind.GRAPH_LAUNCH,
    "copy": CallKind.COPY,
    "set": CallKind.SET,
}

_TICK_NS = 1_000_000_000


class _Lanes:
    """Numbers of threads, for whole columns of them."""

    def __init__(self, naming: Naming, tables: dict[str, pa.Table]) -> None:
        self._naming = naming
        self._comm = {
            (row["pid"], row["tid"]): row["comm"]
            for row in tables["thread"].select(["pid", "tid", "comm"]).to_pylist()
        }
        self._process = {
            row["pid"]: row["comm"] or row["exe"]
            for row in tables["process"].select(["pid", "comm", "exe"]).to_pylist()
        }

    def comm(self, tid: int) -> str:
        """Name and id of a thread, '' for none."""
        if not tid:
            return ""
        name = next((comm for (_, one), comm in self._comm.items() if one == tid), "")
        return f"{name or 'tid'} ({tid})"

    def of(self, table: pa.Table, prefix: str = "") -> I32:
        """The lane of each row by its pid and tid, columns that begin with `prefix`."""
        pids, tids = _whole(table, f"{prefix}pid"), _whole(table, f"{prefix}tid")
        keys, inverse = np.unique((pids << 32) | tids, return_inverse=True)
        numbers = [
            self._naming.thread(
                int(key >> 32),
                int(key & 0xFFFFFFFF),
                self._comm.get((int(key >> 32), int(key & 0xFFFFFFFF)), ""),
                self._process.get(int(key >> 32), ""),
            )
            for key in keys
        ]
        lanes: I32 = np.array(numbers or [0], np.int32)[inverse]
        return lanes

    def wakers(self, spans: pa.Table) -> I64:
        """The lane of the thread that ended each, plus 1; 0 unknown."""
        found = np.zeros(spans.num_rows, np.int64)
        known = np.flatnonzero(_whole(spans, "waker_tid"))
        found[known] = self.of(spans.take(pa.array(known)), "waker_") + 1
        return found


def of_capture(capture: Capture) -> Timeline:
    """The timeline of a capture, on its own clock (CLOCK_MONOTONIC)."""
    naming = Naming()
    tables = capture.tables
    lanes = _Lanes(naming, tables)
    frames = _Frames(tables)
    span = tables["span"]
    kinds = span.column("kind")
    blocked, runqueue = pc.equal(kinds, "blocked"), pc.equal(kinds, "runqueue")
    calls = _calls(naming, lanes, span.filter(pc.equal(kinds, "device")))
    waits = pc.equal(tables["device_run"].column("kind").cast(pa.string()), "sync")
    run = tables["device_run"].filter(pc.invert(waits))
    window = window_of(run)
    whole = window != APART
    traced = run.filter(pa.array(whole))
    times = laid_out(traced)
    gpus = gpus_of_processes(tables["metric"])
    device, asked = _device(naming, lanes, traced, times, gpus)
    if len(device) and not (calls.kind == CallKind.SYNC).any():
        calls = _together(calls, _waits(naming, lanes, tables["device_run"].filter(waits)))
    return Timeline(
        names=naming.names,
        lanes=naming.lanes,
        device=device,
        calls=_together(calls, asked),
        windows_ns=windows_ns(traced, window[whole], *times),
        states=_states(naming, lanes, frames, span.filter(pc.or_(blocked, runqueue))),
        samples=_samples(naming, lanes, frames, tables["sample"]),
        counters=device_counters(tables["metric"]),
        device_ids=device_ids(tables["metric"]),
        gpus_of=gpus,
        totals=[*_totals(lanes, tables["activity"]), *_runs(lanes, run.filter(pa.array(~whole)))],
        timed_ns=_timed(run.filter(pa.array(~whole))),
        extent_ns=(capture.info.start_ns, capture.info.end_ns),
        wall_offset_ns=capture.info.wall_offset_ns,
        tick_ns=_tick(tables["sample"]),
        sources=("sonde",),
    )


def _device(
    naming: Naming,
    lanes: _Lanes,
    rows: pa.Table,
    times: tuple[I64, I64],
    gpus: Mapping[int, Sequence[int]],
) -> tuple[Events, Events]:
    """What the device ran, and a stand-in for each call.

    Who asked is known; when, where runs were timed by events (`device_layout`).
    """
    if not rows.num_rows:
        return no_events(), no_events()
    keys = np.stack([_whole(rows, name) for name in ("pid", "device", "stream")], axis=1)
    different, inverse = np.unique(keys, axis=0, return_inverse=True)
    index = {
        pid: index_of(gpus.get(pid, ()), different[different[:, 0] == pid, 1].tolist())
        for pid in np.unique(different[:, 0]).tolist()
    }
    lane = np.array(
        [naming.stream(index[pid][one], stream, pid) for pid, one, stream in different.tolist()],
        np.int32,
    )
    ids = np.arange(1, rows.num_rows + 1)
    enqueued = _whole(rows, "start_time_ns")
    kind = _coded(rows, "kind", {kind: int(code) for kind, code in _DEVICE_KINDS.items()})
    names = rows.column("name").combine_chunks()
    exchanging = np.array([*map(is_collective, names.dictionary.to_pylist()), False])
    exchanges = exchanging[names.indices.to_numpy()]
    ran = events(
        start_ns=times[0],
        end_ns=times[1],
        kind=np.where((kind == DeviceKind.KERNEL) & exchanges, DeviceKind.COLLECTIVE, kind),
        name=_names(naming, rows, "name"),
        lane=lane[inverse.reshape(-1)],
        correlation=ids,
        bytes=_whole(rows, "bytes"),
        blocks=_blocks(rows),
        way=_coded(rows, "direction", {way: int(code) for way, code in _WAYS.items()}),
    )
    asked = events(
        start_ns=enqueued,
        end_ns=enqueued,
        kind=_coded(rows, "kind", {kind: int(code) for kind, code in _ASKED.items()}),
        name=_names(naming, rows, "name"),
        lane=lanes.of(rows),
        correlation=ids,
    )
    return ran, asked


def _waits(naming: Naming, lanes: _Lanes, rows: pa.Table) -> Events:
    """Waits for the device that the host timed itself."""
    return events(
        start_ns=_whole(rows, "start_time_ns"),
        end_ns=_whole(rows, "end_time_ns"),
        kind=np.full(rows.num_rows, CallKind.SYNC, np.uint8),
        name=_names(naming, rows, "name"),
        lane=lanes.of(rows),
    )


def _timed(rows: pa.Table) -> tuple[int, int] | None:
    """When runs were chosen singly: from the first to the last, and as much more as usually lies
    between two; None where fewer than two were."""
    if rows.num_rows < 2:
        return None
    start = _whole(rows, "start_time_ns")
    first, last = int(start.min()), int(start.max())
    return first, last + (last - first) // (rows.num_rows - 1)


def _blocks(rows: pa.Table) -> I32:
    grids = rows.column("grid").cast(pa.string()).to_pylist()
    known: dict[str, int] = {}
    for grid in set(grids):
        try:
            known[grid] = min(math.prod(int(part) for part in grid.split(",")), (1 << 31) - 1)
        except ValueError:
            known[grid] = 0
    return np.array([known[grid] for grid in grids], np.int32)


def _runs(lanes: _Lanes, rows: pa.Table) -> list[Total]:
    """Estimated totals of what devices ran, from runs chosen one by one."""
    if not rows.num_rows:
        return []
    weight = rows.column("weight").to_numpy()
    ns = weight * (_whole(rows, "end_time_ns") - _whole(rows, "start_time_ns"))
    sums: dict[tuple[int, str], list[float]] = {}
    names = rows.column("name").cast(pa.string()).to_pylist()
    kinds = rows.column("kind").cast(pa.string()).to_pylist()
    for lane, name, kind, length, count in zip(
        lanes.of(rows).tolist(), names, kinds, ns.tolist(), weight.tolist(), strict=True
    ):
        if kind in ("kernel", "replay"):
            total = sums.setdefault((lane, name or kind), [0.0, 0.0])
            total[0] += length
            total[1] += count
    return [
        Total(lane, "run", name, CallKind.LAUNCH, round(length), round(count))
        for (lane, name), (length, count) in sums.items()
    ]


def _calls(naming: Naming, lanes: _Lanes, rows: pa.Table) -> Events:
    # Where a stream waits for an event the thread does not.
    waits = pc.match_substring(rows.column("name").cast(pa.string()), "StreamWaitEvent")
    kind = _coded(rows, "op", {op: int(kind) for op, kind in _CALLS.items()})
    kind[waits.to_numpy()] = CallKind.EVENT
    return events(
        start_ns=_whole(rows, "start_time_ns"),
        end_ns=_whole(rows, "end_time_ns"),
        kind=kind,
        name=_names(naming, rows, "name"),
        lane=lanes.of(rows),
        bytes=_whole(rows, "bytes"),
        way=_coded(rows, "direction", {way: int(code) for way, code in _WAYS.items()}),
    )


def _together(calls: Events, asked: Events) -> Events:
    """Calls, and stand-ins for those that no span holds."""
    if not len(asked):
        return calls
    columns = {
        name: np.concatenate([getattr(calls, name), getattr(asked, name)])
        for name in Events.__slots__
    }
    return events(**columns)


def _states(naming: Naming, lanes: _Lanes, frames: _Frames, rows: pa.Table) -> Events:
    kind = _coded(rows, "kind", {"runqueue": int(StateKind.RUNQUEUE)})
    gil = frames.holding(rows.column("stack_id"), _GIL_FRAMES)
    return events(
        start_ns=_whole(rows, "start_time_ns"),
        end_ns=_whole(rows, "end_time_ns"),
        kind=kind,
        name=_names(naming, rows, "name"),
        lane=lanes.of(rows),
        correlation=lanes.wakers(rows),
        detail=np.where(gil, Hold.GIL, Hold.NONE).astype(np.uint8),
    )


def _samples(naming: Naming, lanes: _Lanes, frames: _Frames, table: pa.Table) -> Samples:
    rows = table.filter(pc.equal(table.column("kind"), "cpu"))
    return Samples(
        time_ns=_whole(rows, "time_ns"),
        lane=lanes.of(rows),
        weight_ns=rows.column("weight_ns").to_numpy().astype(np.int64),
        name=frames.functions(naming, rows.column("stack_id")),
        fault=frames.holding(rows.column("stack_id"), _FAULT_FRAMES),
    )


def _totals(lanes: _Lanes, activity: pa.Table) -> list[Total]:
    keys = ["pid", "tid", "kind", "name", "op", "waker_tid"]
    plain = activity.select([*keys, "ns", "count"])
    for name in ("kind", "name", "op"):
        at = plain.schema.get_field_index(name)
        plain = plain.set_column(at, name, plain.column(name).cast(pa.string()))
    rows = plain.group_by(keys).aggregate([("ns", "sum"), ("count", "sum")])
    lane = lanes.of(rows).tolist() if rows.num_rows else []
    parts: dict[tuple[int, str, str, str], list[tuple[int, int, int]]] = {}
    for number, row in zip(lane, rows.to_pylist(), strict=True):
        key = (number, row["kind"], row["name"], row["op"])
        parts.setdefault(key, []).append((row["ns_sum"], row["count_sum"], row["waker_tid"]))
    totals = []
    for (number, kind, name, op), group in parts.items():
        call = CallKind.OTHER
        if kind == "device":
            call = CallKind.EVENT if "StreamWaitEvent" in name else _CALLS.get(op, call)
        ns, count = sum(one[0] for one in group), sum(one[1] for one in group)
        totals.append(Total(number, kind, name, call, ns, count, lanes.comm(max(group)[2])))
    return totals


def _tick(sample: pa.Table) -> int:
    """What samples are summed over: the usual distance between their times."""
    times = np.unique(_whole(sample, "time_ns"))
    return int(np.median(np.diff(times))) if len(times) > 2 else _TICK_NS


class _Frames:
    """What the stacks of a capture hold."""

    def __init__(self, tables: dict[str, pa.Table]) -> None:
        frame, stack = tables["frame"], tables["stack"]
        self._ids = stack.column("stack_id")
        lists = stack.column("frame_ids").combine_chunks()
        self._flat = lists.flatten()
        self._parents = pc.list_parent_indices(lists).to_numpy(zero_copy_only=False)
        self._frame_ids = frame.column("frame_id")
        self._function = frame.column("function")
        self._kind = frame.column("kind")

    def holding(self, stack_ids: Any, functions: tuple[str, ...]) -> Mask:
        """Whether each stack holds one of the functions."""
        named = pc.is_in(self._function, value_set=pa.array(functions))
        wanted = self._frame_ids.filter(named)
        hit = pc.is_in(self._flat, value_set=wanted.combine_chunks())
        stacks = np.zeros(len(self._ids) + 1, bool)
        stacks[self._parents[hit.to_numpy(zero_copy_only=False)]] = True
        return stacks[self._row(stack_ids)]

    def functions(self, naming: Naming, stack_ids: Any) -> I32:
        """The innermost named function of each stack that is not the kernel's."""
        mine = pc.and_(pc.not_equal(self._kind, "kernel"), pc.not_equal(self._function, ""))
        of_frame = np.full(len(self._frame_ids) + 1, -1, np.int32)
        rows = np.flatnonzero(mine.to_numpy(zero_copy_only=False))
        texts = self._function.take(pa.array(rows)).to_pylist()
        of_frame[rows] = [naming.name(text) for text in texts]
        at = pc.fill_null(pc.index_in(self._flat, value_set=self._frame_ids), -1)
        function = of_frame[at.to_numpy(zero_copy_only=False)]
        named = function >= 0
        leaf = np.full(len(self._ids) + 1, naming.name(""), np.int32)
        parents, first = np.unique(self._parents[named], return_index=True)
        leaf[parents] = function[named][first]
        return leaf[self._row(stack_ids)]

    def _row(self, stack_ids: Any) -> I64:
        at = pc.fill_null(pc.index_in(stack_ids, value_set=self._ids), len(self._ids))
        return np.asarray(at.to_numpy(), np.int64)


def _whole(rows: pa.Table, column: str) -> I64:
    return np.asarray(rows.column(column).to_numpy(), np.int64)


def _names(naming: Naming, rows: pa.Table, column: str) -> I32:
    texts = rows.column(column).combine_chunks()
    known = [naming.name(text) for text in texts.dictionary.to_pylist()]
    numbers: I32 = np.array(known or [0], np.int32)[texts.indices.to_numpy()]
    return numbers


def _coded(rows: pa.Table, column: str, codes: dict[str, int]) -> U8:
    texts = rows.column(column).combine_chunks()
    known = [codes.get(text, 0) for text in texts.dictionary.to_pylist()]
    numbers: U8 = np.array(known or [0], np.uint8)[texts.indices.to_numpy()]
    return numbers
