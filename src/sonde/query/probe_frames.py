# SPDX-License-Identifier: Apache-2.0
"""Removes the frames of tracepoints and BPF programs from stacks of waits.

The stack of a wait is recorded inside the scheduler's tracepoint, so its innermost frames are the
tracepoint and the BPF program, while the thread itself was in the scheduler. On-CPU samples keep
such frames: there they are CPU time that was spent.
"""

from __future__ import annotations

from array import array

import numpy as np

from sonde.model.code import Stacks
from sonde.query.frame_columns import frames_having

_PROBE_PREFIXES = ("bpf_prog_", "bpf_trace_run", "bpf_trampoline_", "__traceiter_", "__bpf_trace_")


def without_probe_frames(stacks: Stacks) -> tuple[Stacks, list[int]]:
    """(the stacks, and after them copies without those frames; for each stack, the index of the one
    to use instead)."""
    is_probe = frames_having(
        stacks.frames, "function", lambda function: function.startswith(_PROBE_PREFIXES)
    )
    probes = set(np.flatnonzero(is_probe).tolist())
    replacement = list(range(len(stacks)))
    if not probes:
        return stacks, replacement
    beginning = _beginning_with(stacks, probes)
    original = np.ascontiguousarray(stacks.frame_indices, np.int32).data
    offsets, frame_indices = array("i"), array("i")
    offsets.frombytes(np.ascontiguousarray(stacks.offsets, np.int32).data.cast("B"))
    frame_indices.frombytes(original.cast("B"))
    added: dict[bytes, int] = {}
    firsts, ends = _after_probes(stacks, beginning, probes)
    for number, first, end in zip(beginning, firsts, ends, strict=True):
        key = original[first:end].tobytes()
        if key not in added:
            added[key] = len(offsets) - 1
            frame_indices.frombytes(key)
            offsets.append(len(frame_indices))
        replacement[number] = added[key]
    return Stacks(stacks.frames, memoryview(offsets), memoryview(frame_indices)), replacement


def _after_probes(
    stacks: Stacks, numbers: list[int], probes: set[int]
) -> tuple[list[int], list[int]]:
    """(positions in `frame_indices` of the first frame that is no probe's, and of the end) of each
    of the stacks."""
    frames = np.asarray(stacks.frame_indices, np.int32)
    is_probe = np.zeros(len(stacks.frames), bool)
    is_probe[list(probes)] = True
    offsets = np.asarray(stacks.offsets, np.int64)
    at = np.array(numbers, np.int64)
    first, ends = offsets[at], offsets[at + 1]
    remaining = np.arange(len(at))
    while len(remaining := remaining[first[remaining] < ends[remaining]]):
        remaining = remaining[is_probe[frames[first[remaining]]]]
        first[remaining] += 1
    return first.tolist(), ends.tolist()


def _beginning_with(stacks: Stacks, frames: set[int]) -> list[int]:
    """Numbers of the stacks whose innermost frame is one of `frames`."""
    offsets = np.asarray(stacks.offsets, np.int64)
    nonempty = np.flatnonzero(np.diff(offsets))
    leaves = np.asarray(stacks.frame_indices, np.int32)[offsets[:-1][nonempty]]
    found: list[int] = nonempty[np.isin(leaves, np.array(sorted(frames), np.int32))].tolist()
    return found
