# SPDX-License-Identifier: Apache-2.0
"""CPU time of threads by activity and by location in the program, from on-CPU stacks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.distinct_rows import distinct_rows
from sonde.model.spinning import POOLS, YIELDS
from sonde.model.timeline import I64, Activity, CallKind, Mask, Total, TotalKind, parts_of
from sonde.query.columns import Frames, ThreadTracks, int64_column
from sonde.query.stack_roles import ACTIVITIES, NUMBER_OF

FAULT_FRAMES = (
    *("exc_page_fault", "asm_exc_page_fault", "handle_mm_fault", "do_user_addr_fault"),
    *("munmap", "__x64_sys_munmap", "__arm64_sys_munmap", "__vm_munmap", "do_vmi_munmap"),
    *("unmap_region", "unmap_vmas", "shmem_evict_inode"),
)
"""Functions of the kernel that allocate or free memory of the program: both are costs of new
mappings."""
_FILE_CALLS = ("close", "newfstat", "newfstatat", "lseek", "fcntl", "getdents64")
FILE_FRAMES = (
    *("vfs_read", "vfs_write", "vfs_readv", "vfs_writev", "vfs_fsync_range", "ksys_read"),
    *("ksys_write", "do_sys_openat2", "__sys_sendto", "__sys_recvfrom", "__sys_sendmsg"),
    *("__sys_recvmsg", "io_submit_one", "vfs_iter_read", "vfs_iter_write"),
    *("vfs_fstat", "vfs_fstatat", "vfs_statx", "ksys_lseek", "iterate_dir", "do_unlinkat"),
    *("do_renameat2", "do_mkdirat", "do_faccessat", "vfs_fallocate", "do_truncate"),
    *(f"__{machine}_sys_{call}" for machine in ("x64", "arm64") for call in _FILE_CALLS),
)
"""Functions of the kernel that open, read, write or close files or sockets for the thread."""
FILE_LINE = 0.33
"""A line whose CPU time is in such functions for this share does nothing else: what the interpreter
and libc add to its calls is a cost of files, too."""
FILE_LINE_SAMPLES = 4
"""Fewer samples in such functions show no line."""
_LAUNCHES = (
    *("cuLaunchKernel", "cuLaunchKernelEx", "cuGraphLaunch", "cuMemcpyHtoDAsync_v2"),
    *("cuMemcpyDtoHAsync_v2", "cuMemcpyDtoDAsync_v2", "cuMemcpyAsync", "cuMemsetD8Async"),
    *("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaGraphLaunch", "cudaMemcpyAsync"),
)
"""A thread that yields in one of them waits for a free slot in the device's queue."""
FULL_QUEUE_YIELDS = 0.4
"""A thread that yields for this share of its time in launches finds the queue full all the time."""


class _SampleKey(NamedTuple):
    """What samples that are summed have in common."""

    track: int
    activity: int
    """Index into `ACTIVITIES`."""
    location: int
    """Index into `StackRoles.locations`; -1 none."""
    service: int
    entry: int
    """As `StackRoles` has them."""
    pool: int
    """As `StackRoles` has it, of `Activity.SPIN`; 0 of others."""


def sample_totals(
    tracks: ThreadTracks,
    frames: Frames,
    sample: pa.Table,
    *,
    in_capture: Mask,
    span: tuple[int, int],
    tick_ns: int,
) -> list[Total]:
    """Totals by thread, activity and location.

    `in_capture`: which stacks capture graphs (`graph_builders`); `span`: start and end of the
    recording in ns; `tick_ns`: the interval that one row sums up.
    """
    rows = sample.filter(pc.equal(sample.column("kind"), "cpu"))
    row = frames.row_of(rows.column("stack_id"))
    activities = _activities(tracks, frames, rows, in_capture)
    roles = frames.roles
    pool = np.where(activities == NUMBER_OF[Activity.SPIN], roles.pool[row], 0)
    in_stacks = (roles.location[row], roles.service[row], roles.entry[row], pool)
    columns = (tracks.of_rows(rows), activities, *in_stacks)  # of `_SampleKey`
    different, inverse = distinct_rows(columns)
    ns = np.zeros(len(different), np.int64)
    np.add.at(ns, inverse, int64_column(rows, "weight_ns"))
    count = np.bincount(inverse, int64_column(rows, "weight_count"), len(different)).round()
    when = np.zeros(len(different), np.uint64)
    part = _parts(int64_column(rows, "time_ns"), span, tick_ns).astype(np.uint64)
    np.bitwise_or.at(when, inverse, np.left_shift(np.uint64(1), part))
    sums = zip(ns.tolist(), count.astype(np.int64).tolist(), when.tolist(), strict=True)
    return [
        Total(
            key.track,
            TotalKind.SAMPLED,
            ACTIVITIES[key.activity],
            CallKind.OTHER,
            ns=sum_ns,
            count=0,
            service=roles.request_of(key.service, key.entry)[0],
            entry=roles.request_of(key.service, key.entry)[1],
            location=roles.location_of(key.location),
            pool=POOLS[key.pool - 1] if key.pool else "",
            samples=samples,
            when=bits,
        )
        for key, (sum_ns, samples, bits) in zip(
            map(_SampleKey._make, different.tolist()), sums, strict=True
        )
    ]


def _activities(tracks: ThreadTracks, frames: Frames, rows: pa.Table, in_capture: Mask) -> I64:
    """Index into `ACTIVITIES` of each row."""
    stacks = rows.column("stack_id")
    row = frames.row_of(stacks)
    by_stack, in_queue = frames.roles.activity[row], frames.roles.in_queue[row]
    is_code = by_stack == NUMBER_OF[Activity.CODE]
    is_input = by_stack == NUMBER_OF[Activity.INPUT]
    by_priority = [  # the first that applies
        (in_capture[row], Activity.BUILD),
        (_full_queue(tracks, frames, rows), Activity.FULL_QUEUE),
        (is_code & (frames.roles.pool[row] > 0), Activity.SPIN),
        (frames.holding(stacks, FAULT_FRAMES) & ~is_input & ~in_queue, Activity.PAGE_FAULT),
        # The thread takes what another thread or process produced out of a queue or a pipe.
        (is_code & in_queue, Activity.INPUT),
        (_on_files(tracks, frames, rows, is_code), Activity.FILE),
    ]
    activities: I64 = np.select(
        [applies for applies, _ in by_priority],
        [NUMBER_OF[one] for _, one in by_priority],
        by_stack.astype(np.int64),
    )
    return activities


def _on_files(tracks: ThreadTracks, frames: Frames, rows: pa.Table, is_code: Mask) -> Mask:
    """Whether each row is in a system call on a file, or at a line of the program that does little
    else: 8 KB from the page cache take less time in the kernel than in what opens the file."""
    stacks = rows.column("stack_id")
    row = frames.row_of(stacks)
    in_calls: Mask = is_code & frames.holding(stacks, FILE_FRAMES)
    location = frames.roles.location[row].astype(np.int64)
    plain = is_code & frames.roles.own_python_innermost[row] & (location >= 0)
    if not (in_calls & plain).any():
        return in_calls
    keys = (tracks.of_rows(rows).astype(np.int64) << 32) | np.maximum(location, 0)
    _, line = np.unique(keys, return_inverse=True)
    weight, count = int64_column(rows, "weight_ns"), int64_column(rows, "weight_count")
    file_ns = np.bincount(line, weight * (in_calls & plain))
    samples = np.bincount(line, count * (in_calls & plain))
    is_file_line = (file_ns >= FILE_LINE * np.bincount(line, weight * plain)) & (
        samples >= FILE_LINE_SAMPLES
    )
    found: Mask = in_calls | (plain & is_file_line[line])
    return found


def _full_queue(tracks: ThreadTracks, frames: Frames, rows: pa.Table) -> Mask:
    """Whether each row is in a launch, of a thread that yields for `FULL_QUEUE_YIELDS` of its time
    in launches."""
    stacks, track = rows.column("stack_id"), tracks.of_rows(rows)
    launching, weight = frames.holding(stacks, _LAUNCHES), int64_column(rows, "weight_ns")
    launch_ns = np.bincount(track, weight * launching)
    yield_ns = np.bincount(track, weight * (launching & frames.holding(stacks, YIELDS)))
    full: Mask = launching & (yield_ns >= FULL_QUEUE_YIELDS * launch_ns)[track]
    return full


def _parts(time_ns: I64, span: tuple[int, int], tick_ns: int) -> I64:
    """The part of the recording (`parts_of`) in which each time lies, from 0."""
    start, end = span
    parts = parts_of(start, end, tick_ns)
    found: I64 = np.clip((time_ns - start) * parts // max(1, end - start), 0, parts - 1)
    return found
