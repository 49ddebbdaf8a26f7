# SPDX-License-Identifier: Apache-2.0
"""Removes the frames of Sonde's BPF programs from stacks of waits.

The stack of a wait is recorded inside the scheduler's tracepoint, so its innermost frames are the
tracepoint and the BPF program, while the thread itself was in the scheduler. On-CPU samples keep
such frames: there they are CPU time that was spent.
"""

from __future__ import annotations

from array import array

import numpy as np

from sonde.model.code import Stacks

_PROBE_PREFIXES = ("bpf_prog_", "bpf_trace_run", "bpf_trampoline_", "__traceiter_", "__bpf_trace_")


def without_probe_frames(stacks: Stacks) -> tuple[Stacks, list[int]]:
    """The stacks with stripped copies appended, and for each stack the index of the one to use."""
    probes = {
        number
        for number, frame in enumerate(stacks.frames)
        if frame.function.startswith(_PROBE_PREFIXES)
    }
    instead = list(range(len(stacks)))
    if not probes:
        return stacks, instead
    offsets, frame_indices = array("i", stacks.offsets), array("i", stacks.frame_indices)
    added: dict[bytes, int] = {}
    for number in _beginning_with(stacks, probes):
        first, end = stacks.offsets[number], stacks.offsets[number + 1]
        while first < end and stacks.frame_indices[first] in probes:
            first += 1
        key = array("i", stacks.frame_indices[first:end]).tobytes()
        if key not in added:
            added[key] = len(offsets) - 1
            frame_indices.frombytes(key)
            offsets.append(len(frame_indices))
        instead[number] = added[key]
    return Stacks(stacks.frames, memoryview(offsets), memoryview(frame_indices)), instead


def _beginning_with(stacks: Stacks, frames: set[int]) -> list[int]:
    """Numbers of the stacks whose innermost frame is one of `frames`."""
    offsets = np.asarray(stacks.offsets, np.int64)
    some = np.flatnonzero(np.diff(offsets))
    leaves = np.asarray(stacks.frame_indices, np.int32)[offsets[:-1][some]]
    found: list[int] = some[np.isin(leaves, np.array(sorted(frames), np.int32))].tolist()
    return found
