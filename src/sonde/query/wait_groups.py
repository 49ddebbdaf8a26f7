# SPDX-License-Identifier: Apache-2.0
"""The lengths of waits that a capture has one by one, and which of them are for TCP."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from sonde.model.distinct_rows import distinct_rows
from sonde.model.serving import ACCEPT_CALLS
from sonde.model.single_waits import SingleWaitKey
from sonde.model.timeline import I64, Mask
from sonde.query.columns import Frames, ThreadTracks, int64_column, texts_of

TCP_FRAMES = ("tcp_recvmsg", "tcp_recvmsg_locked", "tcp_sendmsg", "tcp_sendmsg_locked")
"""Functions of the kernel that read and write TCP connections, and wait there."""
MOSTLY = 0.5
"""Of waits with a stack, by time, that are in such a function."""


def single_waits_of(
    tracks: ThreadTracks, frames: Frames, rows: pa.Table
) -> tuple[dict[SingleWaitKey, I64], frozenset[SingleWaitKey]]:
    """(the lengths of single waits in ns, which of them mostly wait for TCP). `rows`: of `span`,
    those of kind blocked.

    A wait without a stack, of a thread that waits for the same reason for requests and for
    something else, is left out: which of the two it is for is not known.
    """
    if not rows.num_rows:
        return {}, frozenset()
    stacks = rows.column("stack_id")
    roles, row = frames.roles, frames.row_of(stacks)
    names, calls = texts_of(rows, "name"), texts_of(rows, "op")
    numbers: dict[str, int] = {}
    name: I64 = np.array([numbers.setdefault(one, len(numbers)) for one in names], np.int64)
    is_socket = name == numbers.get("socket", -1)
    accepts = np.array([one in ACCEPT_CALLS for one in calls], bool)
    serves: Mask = accepts | roles.serves[row] | (roles.reads[row] & is_socket)
    has_stack: Mask = int64_column(rows, "stack_id") != 0
    is_known: Mask = accepts | has_stack
    ns = np.maximum(int64_column(rows, "end_time_ns") - int64_column(rows, "start_time_ns"), 0)
    is_tcp = frames.holding(stacks, TCP_FRAMES)
    texts = list(numbers)
    found: dict[SingleWaitKey, I64] = {}
    of_tcp = set()
    different, group = distinct_rows([tracks.of_rows(rows).astype(np.int64), name])
    order = np.argsort(group, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(group, minlength=len(different)))[:-1])
    for (track, reason), mine in zip(different.tolist(), parts, strict=True):
        known = mine[is_known[mine]]
        values = np.unique(serves[known]).tolist() or [False]
        for one in values:
            chosen = mine if len(values) == 1 else known[serves[known] == one]
            key = SingleWaitKey(track, texts[reason], one)
            found[key] = ns[chosen]
            with_stack = chosen[has_stack[chosen]]
            whole, in_tcp = ns[with_stack].sum(), ns[with_stack[is_tcp[with_stack]]].sum()
            if whole and in_tcp >= MOSTLY * whole:
                of_tcp.add(key)
    return found, frozenset(of_tcp)
