# SPDX-License-Identifier: Apache-2.0
"""Estimated totals of runs on devices, from runs that were sampled one by one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.collectives import is_collective
from sonde.model.distinct_rows import distinct_rows
from sonde.model.interner import Interner
from sonde.model.single_runs import SingleRuns, no_single_runs
from sonde.model.timeline import (
    I32,
    I64,
    CallKind,
    CopyDirection,
    Mask,
    Total,
    TotalKind,
    WaitDetail,
)
from sonde.query.columns import (
    Frames,
    ThreadTracks,
    blocks_of,
    codes_of,
    int64_column,
    names_of,
    texts_of,
)
from sonde.query.device_kinds import CALL_KIND_OF_RUN, DIRECTIONS

STRETCHED = 4
"""A run counts as interrupted if it took more than this many times the usual length of its kernel,
and longer than usual by more than `TIME_SLICE_NS`."""
TIME_SLICE_NS = 1_000_000
"""Shortest time slice that a device gives to another process."""
LEAST_RUNS = 20
"""Runs of one kernel with one number of thread blocks; of fewer no usual length is known."""
FEW_BLOCKS = 16
"""Kernels with at most this many blocks leave most of a device with 40 or more multiprocessors
idle."""
_DIRECTIONS = {name: int(code) for name, code in DIRECTIONS.items()}


class _RunKey(NamedTuple):
    """What runs that are summed have in common."""

    track: int
    kind: str
    name: str
    direction: int
    """`CopyDirection`."""


class _StreamKey(NamedTuple):
    """What kernels that are summed by stream have in common."""

    track: int
    device: int
    stream: int
    location: int
    """Index into `StackRoles.locations`; -1 none."""
    in_capture: int
    """1 for kernels launched by code that captures graphs (`graph_builders`), else 0."""


def run_totals(
    tracks: ThreadTracks,
    frames: Frames,
    rows: pa.Table,
    *,
    in_capture: Mask,
    shared: Collection[int],
) -> list[Total]:
    """Totals of runs by kernel, and of kernels by stream.

    `rows`: of `device_run`; `in_capture`: which stacks capture graphs (`graph_builders`); `shared`:
    processes whose devices another process used, too. Of their kernels that took far longer than
    usual, the time beyond the usual is not of `TotalKind.RUN`, but of `TotalKind.INTERRUPTED`.
    Kernels with at most `FEW_BLOCKS` thread blocks also count as `TotalKind.UNDERFILLED`.
    """
    if not rows.num_rows:
        return []
    weight = rows.column("weight").to_numpy()
    length_ns = int64_column(rows, "end_time_ns") - int64_column(rows, "start_time_ns")
    moved, blocks = int64_column(rows, "bytes"), blocks_of(rows)
    made = _stream_totals(tracks, frames, rows, in_capture)
    by_kernel = _by_kernel(tracks, rows)
    interrupted_ns = _interrupted_ns(by_kernel, rows, shared)
    for key, mine in by_kernel.items():
        ns, weights, grid = length_ns[mine], weight[mine], blocks[mine]
        beyond = interrupted_ns[mine]
        is_kernel = key.kind == "kernel"
        made.append(
            Total(
                key.track,
                TotalKind.RUN,
                key.name or key.kind,
                CALL_KIND_OF_RUN[key.kind],
                ns=round((weights * (ns - beyond)).sum()),
                count=round(weights.sum()),
                bytes=round((weights * moved[mine]).sum()),
                direction=CopyDirection(key.direction),
            )
        )
        is_underfilled = (grid > 0) & (grid <= FEW_BLOCKS)
        for kind, part in (
            (TotalKind.UNDERFILLED, ns * is_underfilled),
            (TotalKind.INTERRUPTED, beyond),
        ):
            if is_kernel and part.any():
                part_ns = round((weights * part).sum())
                made.append(Total(key.track, kind, key.name, CallKind.OTHER, part_ns, 0))
    return made


def single_runs(
    naming: Interner, tracks: ThreadTracks, rows: pa.Table, *, shared: Collection[int]
) -> SingleRuns:
    """The rows of `device_run` that `run_totals` sums up, one by one, by the time of the launch."""
    kinds = pc.is_in(rows.column("kind").cast(pa.string()), pa.array(list(CALL_KIND_OF_RUN)))
    rows = rows.filter(kinds).sort_by("start_time_ns")
    if not rows.num_rows:
        return no_single_runs()
    start_ns = int64_column(rows, "start_time_ns")
    beyond = _interrupted_ns(_by_kernel(tracks, rows), rows, shared)
    streams = [int64_column(rows, name) for name in ("pid", "device", "stream")]
    return SingleRuns(
        start_ns=start_ns,
        length_ns=int64_column(rows, "end_time_ns") - start_ns - beyond,
        weight=rows.column("weight").to_numpy(),
        track=tracks.of_rows(rows),
        name=names_of(naming, rows, "name"),
        call=codes_of(rows, "kind", {kind: int(code) for kind, code in CALL_KIND_OF_RUN.items()}),
        stream=distinct_rows(streams)[1],
        direction=codes_of(rows, "direction", _DIRECTIONS),
        bytes=int64_column(rows, "bytes"),
    )


def _interrupted_ns(
    by_kernel: Mapping[_RunKey, Sequence[int]], rows: pa.Table, shared: Collection[int]
) -> I64:
    """How long other processes interrupted each run (`_beyond_usual`), in ns; 0 for other runs than
    kernels of the processes `shared`."""
    beyond = np.zeros(rows.num_rows, np.int64)
    if not shared:
        return beyond
    length_ns = int64_column(rows, "end_time_ns") - int64_column(rows, "start_time_ns")
    blocks, pids = blocks_of(rows), int64_column(rows, "pid")
    for key, mine in by_kernel.items():
        if key.kind == "kernel" and int(pids[mine[0]]) in shared:
            beyond[mine] = _beyond_usual(length_ns[mine], blocks[mine])
    return beyond


def _by_kernel(tracks: ThreadTracks, rows: pa.Table) -> dict[_RunKey, list[int]]:
    """The rows of each thread, kind of run, kernel and direction of copies."""
    columns = (tracks.of_rows(rows), codes_of(rows, "direction", _DIRECTIONS))
    track, direction = (column.tolist() for column in columns)
    kinds, names = texts_of(rows, "kind"), texts_of(rows, "name")
    found: dict[_RunKey, list[int]] = {}
    for row, key in enumerate(map(_RunKey, track, kinds, names, direction)):
        if key.kind in CALL_KIND_OF_RUN:
            found.setdefault(key, []).append(row)
    return found


def _beyond_usual(ns: I64, blocks: I32) -> I64:
    """How much longer than usual each run of a kernel took, in ns, if it is `STRETCHED`; else 0.

    The usual length is the median of the runs with as many thread blocks. So a kernel that often
    takes long by itself does not count as interrupted. `ns`, `blocks`: length and thread blocks of
    each run.
    """
    beyond = np.zeros(len(ns), np.int64)
    for count in np.unique(blocks):
        same = np.flatnonzero(blocks == count)
        if len(same) >= LEAST_RUNS:
            usual = int(np.median(ns[same]))
            over = ns[same] - usual
            far = (ns[same] > STRETCHED * usual) & (over > TIME_SLICE_NS)
            beyond[same] = np.where(far, over, 0)
    return beyond


def _stream_totals(
    tracks: ThreadTracks, frames: Frames, rows: pa.Table, in_capture: Mask
) -> list[Total]:
    """Kernels and graphs, collectives left out, by stream and by the location in the program that
    launched them; those of code that captures graphs are apart."""
    ran = pc.is_in(rows.column("kind").cast(pa.string()), pa.array(["kernel", "replay"]))
    rows = rows.filter(ran)
    names = rows.column("name").combine_chunks()
    collective = np.array([*map(is_collective, names.dictionary.to_pylist()), False])
    rows = rows.filter(pa.array(~collective[names.indices.to_numpy()]))
    roles, row = frames.roles, frames.row_of(rows.column("stack_id"))
    device, stream = int64_column(rows, "device"), int64_column(rows, "stream")
    # In the order of `_StreamKey`.
    columns = (tracks.of_rows(rows), device, stream, roles.location[row], in_capture[row])
    different, inverse = distinct_rows(columns)
    length_ns = int64_column(rows, "end_time_ns") - int64_column(rows, "start_time_ns")
    weight = rows.column("weight").to_numpy()
    sums = np.bincount(inverse, weight * length_ns, len(different)).round().tolist()
    counts = np.bincount(inverse, weight, len(different)).round().tolist()
    return [
        Total(
            key.track,
            TotalKind.STREAM,
            "",
            CallKind.OTHER,
            ns=int(ns),
            count=int(count),
            device=key.device,
            stream=key.stream,
            location=roles.location_of(key.location),
            wait_detail=WaitDetail.GRAPH_CAPTURE if key.in_capture else WaitDetail.NONE,
        )
        for key, ns, count in zip(
            map(_StreamKey._make, different.tolist()), sums, counts, strict=True
        )
    ]
