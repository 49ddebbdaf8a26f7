# SPDX-License-Identifier: Apache-2.0
"""Totals per thread and of its runs on devices, for what is not recorded interval by interval."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.timeline import (
    Activity,
    CallKind,
    CopyDirection,
    Interner,
    ThreadOwner,
    Total,
    TotalKind,
    WaitDetail,
    parts_of,
)
from sonde.query.columns import Frames, Lanes, blocks_of, coded, texts_of, whole
from sonde.query.stack_roles import ACTIVITIES

WAYS = {
    "h2d": CopyDirection.H2D,
    "d2h": CopyDirection.D2H,
    "d2d": CopyDirection.D2D,
    "h2h": CopyDirection.H2H,
    "p2p": CopyDirection.P2P,
}
CALLS = {
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
FAULT_FRAMES = (
    *("exc_page_fault", "asm_exc_page_fault", "handle_mm_fault", "do_user_addr_fault"),
    *("munmap", "__x64_sys_munmap", "__arm64_sys_munmap", "__vm_munmap", "do_vmi_munmap"),
    *("unmap_region", "unmap_vmas", "shmem_evict_inode"),
)
"""The kernel allocates or frees memory of the program: both are costs of new mappings."""
FILE_FRAMES = (
    *("vfs_read", "vfs_write", "vfs_readv", "vfs_writev", "vfs_fsync_range", "ksys_read"),
    *("ksys_write", "do_sys_openat2", "__sys_sendto", "__sys_recvfrom", "__sys_sendmsg"),
    *("__sys_recvmsg", "io_submit_one", "vfs_iter_read", "vfs_iter_write"),
)
"""The kernel reads or writes for the thread."""
GIL_FRAMES = ("take_gil", "PyEval_RestoreThread", "PyGILState_Ensure")
ASKED = {
    "kernel": CallKind.LAUNCH,
    "replay": CallKind.GRAPH_LAUNCH,
    "copy": CallKind.COPY,
    "set": CallKind.SET,
}

_KINDS = {
    "blocked": TotalKind.BLOCKED,
    "runqueue": TotalKind.RUNQUEUE,
    "device": TotalKind.CALL,
}
"""Kinds of rows of `activity` that are read."""
_YIELDS = ("sched_yield", "do_sched_yield", "__sched_yield")
_LAUNCHES = (
    *("cuLaunchKernel", "cuLaunchKernelEx", "cuGraphLaunch", "cuMemcpyHtoDAsync_v2"),
    *("cuMemcpyDtoHAsync_v2", "cuMemcpyDtoDAsync_v2", "cuMemcpyAsync", "cuMemsetD8Async"),
    *("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaGraphLaunch", "cudaMemcpyAsync"),
)
"""A thread that yields in one of them waits for a free slot in the device's queue."""
MOSTLY = 0.4
"""A thread that yields for this share of its time in launches finds the queue full all the time."""
_IN_CALLS = (Activity.DEVICE_WAIT, Activity.COPY, Activity.ALLOCATION)
"""What a thread that is blocked within a device's call does there."""
MOST_PARTS = 16
"""Places that the waits of one thread for one reason are split into: the longest."""
STRETCHED = 4
"""A kernel that took this many times its usual time, and a turn of a rival longer, was held up."""
TURN_NS = 1_000_000
USUAL_OF = 20
FEW_BLOCKS = 16
"""Kernels with so few blocks leave most of a device with 40 or more multiprocessors idle."""
RARELY = 0.5
"""More long runs of a kernel than this, and the median is not its usual length."""


def totals_of(
    lanes: Lanes,
    frames: Frames,
    tables: dict[str, pa.Table],
    run: pa.Table,
    span: tuple[int, int],
    tick_ns: int,
    shared: Collection[int],
) -> list[Total]:
    """All totals; `run`: rows of `device_run` that were sampled one by one; `span`: begin and end
    of the record; `tick_ns`: the interval that one sample sums up; `shared`: processes whose
    devices another process used, too."""
    return [
        *_totals(lanes, frames, tables),
        *_sampled(lanes, frames, tables["sample"], span, tick_ns),
        *_runs(lanes, run, shared),
    ]


def set_owners(naming: Interner, lanes: Lanes, frames: Frames, sample: pa.Table) -> None:
    """Notes of each thread whose code it runs, by all of its stacks that say so."""
    owner = frames.roles.owner[frames.row_of(sample.column("stack_id"))]
    found: dict[int, set[ThreadOwner]] = {}
    owners = list(ThreadOwner)
    keys = np.unique(lanes.of(sample).astype(np.int64) * 8 + owner)
    for key in keys.tolist():
        if key % 8:
            found.setdefault(key // 8, set()).add(owners[key % 8 - 1])
    for track, those in found.items():
        if len(those) == 1:
            naming.tracks[track] = replace(naming.tracks[track], owner=those.pop())


def parents_of(process: pa.Table) -> dict[int, int]:
    """The parent of each process."""
    return dict(
        zip(process.column("pid").to_pylist(), process.column("ppid").to_pylist(), strict=True)
    )


def _runs(lanes: Lanes, rows: pa.Table, shared: Collection[int]) -> list[Total]:
    """Estimated totals of runs on devices, from runs sampled one by one.

    Where another process used the device, kernels that took far longer than usual are cut: the rest
    is of `TotalKind.INTERRUPTED`. Kernels with so few thread blocks that most of any device stays
    idle also count as `TotalKind.UNDERFILLED`.
    """
    if not rows.num_rows:
        return []
    weight = rows.column("weight").to_numpy()
    length = whole(rows, "end_time_ns") - whole(rows, "start_time_ns")
    moved, blocks = whole(rows, "bytes"), blocks_of(rows)
    names, kinds = texts_of(rows, "name"), texts_of(rows, "kind")
    pids = whole(rows, "pid")
    ways = coded(rows, "direction", {way: int(code) for way, code in WAYS.items()}).tolist()
    groups: dict[tuple[int, str, str, int], list[int]] = {}
    for row, key in enumerate(zip(lanes.of(rows).tolist(), kinds, names, ways, strict=True)):
        if key[1] in ASKED:
            groups.setdefault(key, []).append(row)
    made = []
    for (lane, kind, name, way), mine in groups.items():
        ns, heavy = length[mine], weight[mine]
        usual = int(np.median(ns))
        beyond = np.where((ns > STRETCHED * usual) & (ns > usual + TURN_NS), ns - usual, 0)
        others = int(pids[mine[0]]) in shared
        if not others or kind != "kernel" or len(mine) < USUAL_OF or (beyond > 0).mean() > RARELY:
            beyond = np.zeros(len(mine), np.int64)
        count, size = round(heavy.sum()), round((heavy * moved[mine]).sum())
        own = round((heavy * (ns - beyond)).sum())
        made.append(
            Total(
                lane,
                TotalKind.RUN,
                name or kind,
                ASKED[kind],
                own,
                count,
                bytes=size,
                direction=CopyDirection(way),
            )
        )
        few = (blocks[mine] > 0) & (blocks[mine] <= FEW_BLOCKS)
        if few.any() and kind == "kernel":
            alone = round((heavy * ns * few).sum())
            made.append(Total(lane, TotalKind.UNDERFILLED, name, CallKind.OTHER, alone, 0))
        if beyond.any():
            taken = round((heavy * beyond).sum())
            made.append(Total(lane, TotalKind.INTERRUPTED, name, CallKind.OTHER, taken, 0))
    return made


def _sampled(
    lanes: Lanes, frames: Frames, table: pa.Table, span: tuple[int, int], tick_ns: int
) -> list[Total]:
    """CPU time by activity and by place in the program, from on-CPU stacks. `span`: begin and end
    of the record."""
    rows = table.filter(pc.equal(table.column("kind"), "cpu"))
    stacks = rows.column("stack_id")
    lane, weight = lanes.of(rows), whole(rows, "weight_ns")
    roles, row = frames.roles, frames.row_of(stacks)
    launching = frames.holding(stacks, _LAUNCHES)
    yields = np.bincount(lane, weight * (launching & frames.holding(stacks, _YIELDS)))
    full = launching & (yields >= MOSTLY * np.bincount(lane, weight * launching))[lane]
    fault = frames.holding(stacks, FAULT_FRAMES)
    about = roles.activity[row].astype(np.int64)
    loads = about == ACTIVITIES.index(Activity.INPUT)
    code = about == ACTIVITIES.index(Activity.CODE)
    about[code & frames.holding(stacks, FILE_FRAMES)] = ACTIVITIES.index(Activity.FILE)
    about[fault & ~loads] = ACTIVITIES.index(Activity.PAGE_FAULT)
    about[full] = ACTIVITIES.index(Activity.FULL_QUEUE)
    keys = np.stack([lane.astype(np.int64), about, roles.place[row].astype(np.int64)], axis=1)
    made = []
    different, inverse = np.unique(keys, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    sums = np.zeros(len(different), np.int64)
    np.add.at(sums, inverse, weight)
    counts = np.bincount(inverse, whole(rows, "weight_count"), len(different))
    start, end = span
    part = parts_of(start, end, tick_ns)
    at = np.clip((whole(rows, "time_ns") - start) * part // max(1, end - start), 0, part - 1)
    when = np.zeros(len(different), np.uint64)
    np.bitwise_or.at(when, inverse, np.left_shift(np.uint64(1), at.astype(np.uint64)))
    columns = (one.tolist() for one in (different, sums, counts.round().astype(np.int64), when))
    for (track, number, place), ns, count, bits in zip(*columns, strict=True):
        made.append(
            Total(
                track,
                TotalKind.SAMPLED,
                ACTIVITIES[number],
                CallKind.OTHER,
                ns,
                0,
                place=roles.places[place] if place >= 0 else "",
                samples=count,
                when=bits,
            )
        )
    return made


def _totals(lanes: Lanes, frames: Frames, tables: dict[str, pa.Table]) -> list[Total]:
    activity, within = tables["activity"], _within(lanes, frames, tables["sample"])
    keys = ["pid", "tid", "kind", "name", "op", "direction", "waker_tid"]
    plain = activity.select([*keys, "ns", "count", "bytes"])
    texts = {}
    for name in ("kind", "name", "op", "direction"):  # by dictionary index: a text may be long
        column = plain.column(name).combine_chunks()
        texts[name] = column.dictionary.to_pylist()
        plain = plain.set_column(plain.schema.get_field_index(name), name, column.indices)
    rows = plain.group_by(keys).aggregate([("ns", "sum"), ("count", "sum"), ("bytes", "sum")])
    if not rows.num_rows:
        return []
    keyed = (map(known.__getitem__, rows.column(name).to_pylist()) for name, known in texts.items())
    figures = ("ns_sum", "waker_tid", "count_sum", "bytes_sum")
    figured = (rows.column(name).to_pylist() for name in figures)
    parts: dict[tuple[int, str, str, str, str], list[tuple[int, ...]]] = {}
    for number, kind, name, op, direction, *sums in zip(
        lanes.of(rows).tolist(), *keyed, *figured, strict=True
    ):
        parts.setdefault((number, kind, name, op, direction), []).append(tuple(sums))
    totals: list[Total] = []
    for (number, kind, name, op, direction), group in parts.items():
        call = CallKind.OTHER
        if kind not in _KINDS:
            continue
        if kind == "device":
            call = CallKind.EVENT if "StreamWaitEvent" in name else CALLS.get(op, call)
        longest = max(group)
        ns, count, moved = (sum(row[at] for row in group) for at in (0, 2, 3))
        way = WAYS.get(direction, CopyDirection.UNKNOWN)
        waker = lanes.comm(longest[1])
        total = Total(
            number, _KINDS[kind], name, call, ns, count, waker, longest[0],
            waker_track=lanes.of_tid(longest[1]), bytes=moved, direction=way,
        )  # fmt: skip
        totals += _parted(total, within.get((number, kind, name), {}))
    return totals


Part = tuple[WaitDetail, str]
"""What a wait was for, and its place in the program."""


def _parted(total: Total, within: Mapping[Part, float]) -> list[Total]:
    """The total, split: `within` has the share of each part; what is left has no detail."""
    made = []
    left = total
    for (what, place), part in within.items():
        columns = {
            name: min(getattr(left, name), round(getattr(total, name) * part))
            for name in ("ns", "count", "bytes", "waker_ns")
        }
        made.append(replace(total, **columns, wait_detail=what, place=place))
        rest = {name: getattr(left, name) - amount for name, amount in columns.items()}
        left = replace(left, **rest)
    return [*made, left] if left.ns or left.count or not made else made


def _within(
    lanes: Lanes, frames: Frames, sample: pa.Table
) -> dict[tuple[int, str, str], dict[Part, float]]:
    """By thread, kind and reason of a wait, or function of a device call: the share of each `Part`,
    from the sampled stacks."""
    rows = sample.filter(pc.is_in(sample.column("kind"), pa.array(["blocked", "device"])))
    stacks = rows.column("stack_id")
    weight = whole(rows, "weight_ns")
    kinds, names = texts_of(rows, "kind"), texts_of(rows, "name")
    roles, row = frames.roles, frames.row_of(stacks)
    activity = roles.activity[row]
    in_call = np.isin(activity, [ACTIVITIES.index(one) for one in _IN_CALLS])
    loads = activity == ACTIVITIES.index(Activity.INPUT)
    held = frames.holding(stacks, GIL_FRAMES)
    details = (
        *(WaitDetail.INPUT, WaitDetail.IN_CALL, WaitDetail.GIL),
        *(WaitDetail.COMPUTE, WaitDetail.HAND_OVER),
    )
    chosen = [loads, in_call, held, roles.computes[row], roles.hands_over[row]]
    about = np.select(chosen, details, 0)
    places = roles.place[row]
    sums: dict[tuple[int, str, str], dict[Part, int]] = {}
    columns = (lanes.of(rows), about, places, weight)
    figures = (column.tolist() for column in columns)
    for kind, name, lane, what, place, ns in zip(kinds, names, *figures, strict=True):
        detail = WaitDetail(what) if kind == "blocked" else WaitDetail.NONE
        if detail == WaitDetail.GIL and name != "futex":
            detail = WaitDetail.NONE
        part = detail, roles.places[place] if place >= 0 else ""
        parts = sums.setdefault((lane, kind, name), {})
        parts[part] = parts.get(part, 0) + int(ns)
    found = {}
    for key, parts in sums.items():
        all_ns = sum(parts.values())
        ranked = sorted(parts.items(), key=lambda item: -item[1])
        found[key] = {part: ns / all_ns for part, ns in ranked[:MOST_PARTS] if all_ns}
    return found
