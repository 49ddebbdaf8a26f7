# SPDX-License-Identifier: Apache-2.0
"""Totals per thread and of its runs on devices, for what is not recorded interval by interval."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.collectives import is_collective
from sonde.model.timeline import (
    Activity,
    CallKind,
    CopyDirection,
    Interner,
    Mask,
    ThreadOwner,
    Total,
    TotalKind,
    WaitDetail,
    parts_of,
)
from sonde.query.columns import Frames, Lanes, blocks_of, coded, texts_of, whole
from sonde.query.graph_builders import building
from sonde.query.stack_roles import ACTIVITIES
from sonde.query.wait_parts import WaitPart, parts_of_waits

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
MOST_WAKERS = 8
"""Threads that the waits of one thread for one reason are split by, where no stack was taken."""
STRETCHED = 4
"""A kernel that took this many times its usual time, and a co-tenant's turn longer, was held up."""
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
    builds = building(frames, tables["sample"])
    return [
        *_totals(lanes, frames, tables, builds),
        *_sampled(lanes, frames, tables["sample"], builds, span, tick_ns),
        *_runs(lanes, frames, run, builds, shared),
    ]


def set_owners(naming: Interner, lanes: Lanes, frames: Frames, sample: pa.Table) -> None:
    """Notes of each thread whose code it runs, by all of its stacks that show it."""
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


def callers_of(frames: Frames, sample: pa.Table) -> dict[str, str]:
    """By place: the place that called it, where one function did for most of its time."""
    roles, row = frames.roles, frames.row_of(sample.column("stack_id"))
    place, caller = roles.place[row].astype(np.int64), roles.caller[row].astype(np.int64)
    weight = whole(sample, "weight_ns")
    sums: dict[int, int] = {}
    called: dict[int, dict[int, int]] = {}
    base = len(roles.places) + 1
    keys, inverse = np.unique((place + 1) * base + caller + 1, return_inverse=True)
    counts = np.bincount(inverse, weight, len(keys)).tolist()
    pairs = np.stack(np.divmod(keys, base), axis=1) - 1
    for (mine, other), count in zip(pairs.tolist(), counts, strict=True):
        sums[mine] = sums.get(mine, 0) + count
        called.setdefault(mine, {})[other] = count
    sums.pop(-1, None)
    most = {mine: max(called[mine], key=lambda it: called[mine][it]) for mine in sums}
    return {
        roles.places[mine]: roles.places[other]
        for mine, other in most.items()
        if other >= 0 and 2 * called[mine][other] > sums[mine]
    }


def parents_of(process: pa.Table) -> dict[int, int]:
    """The parent of each process."""
    return dict(
        zip(process.column("pid").to_pylist(), process.column("ppid").to_pylist(), strict=True)
    )


def _runs(
    lanes: Lanes, frames: Frames, rows: pa.Table, builds: Mask, shared: Collection[int]
) -> list[Total]:
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
    made = _of_streams(lanes, frames, rows, builds)
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


def _of_streams(lanes: Lanes, frames: Frames, rows: pa.Table, builds: Mask) -> list[Total]:
    """Kernels and graphs by stream, and by the place in the program that asked for them; those of
    building a graph are distinguished."""
    ran = pc.is_in(rows.column("kind").cast(pa.string()), pa.array(["kernel", "replay"]))
    rows = rows.filter(ran)
    names = rows.column("name").combine_chunks()
    exchanges = np.array([*map(is_collective, names.dictionary.to_pylist()), False])
    rows = rows.filter(pa.array(~exchanges[names.indices.to_numpy()]))
    row = frames.row_of(rows.column("stack_id"))
    place, built = frames.roles.place[row].astype(np.int64), builds[row].astype(np.int64)
    lane = lanes.of(rows).astype(np.int64)
    keys = np.stack([lane, whole(rows, "device"), whole(rows, "stream"), place, built], axis=1)
    different, inverse = np.unique(keys, axis=0, return_inverse=True)
    places = [*frames.roles.places, ""]  # the last one for -1
    length = whole(rows, "end_time_ns") - whole(rows, "start_time_ns")
    weight = rows.column("weight").to_numpy()
    ns = np.bincount(inverse.reshape(-1), weight * length, len(different)).round().tolist()
    return [
        Total(
            lane,
            TotalKind.STREAM,
            f"{device} {stream}",
            CallKind.OTHER,
            int(sum_ns),
            0,
            place=places[at],
            wait_detail=WaitDetail.BUILD if for_building else WaitDetail.NONE,
        )
        for (lane, device, stream, at, for_building), sum_ns in zip(
            different.tolist(), ns, strict=True
        )
    ]


def _sampled(
    lanes: Lanes,
    frames: Frames,
    table: pa.Table,
    builds: Mask,
    span: tuple[int, int],
    tick_ns: int,
) -> list[Total]:
    """CPU time by activity and by place in the program, from on-CPU stacks. `builds`: of stacks;
    `span`: begin and end of the record."""
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
    # What another thread or process hands over is taken apart here, out of a queue or a pipe.
    about[code & roles.hands_over[row]] = ACTIVITIES.index(Activity.INPUT)
    about[fault & ~loads & ~roles.hands_over[row]] = ACTIVITIES.index(Activity.PAGE_FAULT)
    about[full] = ACTIVITIES.index(Activity.FULL_QUEUE)
    about[builds[row]] = ACTIVITIES.index(Activity.BUILD)
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


def _totals(lanes: Lanes, frames: Frames, tables: dict[str, pa.Table], builds: Mask) -> list[Total]:
    activity = tables["activity"]
    within = parts_of_waits(lanes, frames, tables["sample"], activity, builds)
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
        ns, count, moved = (sum(row[at] for row in group) for at in (0, 2, 3))
        way = WAYS.get(direction, CopyDirection.UNKNOWN)
        total = Total(
            number, _KINDS[kind], name, call, ns, count, bytes=moved, direction=way
        )  # fmt: skip
        parts_here = within.get((number, kind, name)) or _by_waker(group)
        totals += _parted(lanes, total, parts_here, max(group))
    return totals


def _by_waker(group: Sequence[tuple[int, ...]]) -> dict[WaitPart, float]:
    """The shares of the threads that ended the waits, where no stack was taken."""
    whole_ns = sum(row[0] for row in group)
    ranked = sorted(group, reverse=True)[:MOST_WAKERS]
    if not whole_ns or not any(row[1] for row in ranked):
        return {}
    return {WaitPart(WaitDetail.NONE, "", row[1]): row[0] / whole_ns for row in ranked}


def _parted(
    lanes: Lanes, total: Total, parts: Mapping[WaitPart, float], longest: tuple[int, ...]
) -> list[Total]:
    """The total, split by shares; what is left has no detail.

    `longest`: (ns, thread that ended it) of the longest part by the thread that ended it, for parts
    of which that thread is not known.
    """
    made = []
    left = total
    usual = longest[0] / max(1, total.ns)
    for part, share in parts.items():
        columns = {
            name: min(getattr(left, name), round(getattr(total, name) * share))
            for name in ("ns", "count", "bytes")
        }
        rest = {name: getattr(left, name) - amount for name, amount in columns.items()}
        left = replace(left, **rest)
        known = part.waker_tid >= 0
        tid = part.waker_tid if known else longest[1]
        made.append(
            replace(
                total,
                **columns,
                wait_detail=part.detail,
                place=part.place,
                waker=lanes.comm(tid),
                waker_track=lanes.of_tid(tid),
                waker_ns=round(columns["ns"] * (1.0 if known else usual)) if tid else 0,
            )
        )
    return [*made, left] if left.ns or left.count or not made else made
