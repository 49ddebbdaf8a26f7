# SPDX-License-Identifier: Apache-2.0
"""Removes the frames of tracepoints and BPF programs from stacks of waits.

The stack of a wait is recorded inside the scheduler's tracepoint, so its innermost frames are the
tracepoint and the BPF program, while the thread itself was in the scheduler. On-CPU samples keep
such frames: there they are CPU time that was spent.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sonde.model.code import Stacks
from sonde.query.frame_columns import frames_having

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

PROBE_PREFIXES = ("bpf_prog_", "bpf_trace_run", "bpf_trampoline_", "__traceiter_", "__bpf_trace_")
"""How the names of such functions begin."""


def without_probe_frames(stacks: Stacks) -> tuple[Stacks, I32]:
    """(the stacks, and after them copies without those frames; for each stack, the index of the one
    to use instead)."""
    is_probe = frames_having(
        stacks.frames, "function", lambda function: function.startswith(PROBE_PREFIXES)
    )
    replacement = np.arange(len(stacks), dtype=np.int32)
    beginning = _beginning_with(stacks, is_probe)
    if not len(beginning):
        return stacks, replacement
    flat = np.ascontiguousarray(stacks.frame_indices, np.int32)
    firsts, ends = _after_probes(stacks, beginning, is_probe)
    frames = flat.data.cast("B")
    added: dict[bytes, int] = {}
    numbers = [
        added.setdefault(bytes(frames[first:end]), len(added))
        for first, end in zip((4 * firsts).tolist(), (4 * ends).tolist(), strict=True)
    ]
    replacement[beginning] = np.array(numbers, np.int32) + np.int32(len(stacks))
    offsets = np.empty(len(stacks) + 1 + len(added), np.int32)
    offsets[: len(stacks) + 1] = stacks.offsets
    sizes = np.fromiter(map(len, added), np.int64, len(added)) // 4
    offsets[len(stacks) + 1 :] = offsets[len(stacks)] + np.cumsum(sizes)
    joined = np.concatenate((flat, np.frombuffer(b"".join(added), np.int32)))
    return Stacks(stacks.frames, offsets.data, joined.data), replacement


def _after_probes(stacks: Stacks, numbers: I64, is_probe: Mask) -> tuple[I64, I64]:
    """(positions in `frame_indices` of the first frame that is no probe's, and of the end) of each
    of the stacks."""
    frames = np.asarray(stacks.frame_indices, np.int32)
    offsets = np.asarray(stacks.offsets, np.int64)
    first, ends = offsets[numbers], offsets[numbers + 1]
    remaining = np.arange(len(numbers))
    while len(remaining := remaining[first[remaining] < ends[remaining]]):
        remaining = remaining[is_probe[frames[first[remaining]]]]
        first[remaining] += 1
    return first, ends


def _beginning_with(stacks: Stacks, frames: Mask) -> I64:
    """Numbers of the stacks whose innermost frame is one of `frames`."""
    offsets = np.asarray(stacks.offsets, np.int64)
    nonempty = np.flatnonzero(np.diff(offsets))
    leaves = np.asarray(stacks.frame_indices, np.int32)[offsets[:-1][nonempty]]
    return nonempty[frames[leaves]]
