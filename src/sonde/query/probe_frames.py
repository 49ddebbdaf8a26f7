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
    beginning = _beginning_with(stacks, probes)
    source = np.ascontiguousarray(stacks.frame_indices, np.int32).data
    offsets, frame_indices = array("i"), array("i")
    offsets.frombytes(np.ascontiguousarray(stacks.offsets, np.int32).data.cast("B"))
    frame_indices.frombytes(source.cast("B"))
    added: dict[bytes, int] = {}
    firsts, ends = _after_probes(stacks, beginning, probes)
    for number, first, end in zip(beginning, firsts, ends, strict=True):
        key = source[first:end].tobytes()
        if key not in added:
            added[key] = len(offsets) - 1
            frame_indices.frombytes(key)
            offsets.append(len(frame_indices))
        instead[number] = added[key]
    return Stacks(stacks.frames, memoryview(offsets), memoryview(frame_indices)), instead


def _after_probes(
    stacks: Stacks, numbers: list[int], probes: set[int]
) -> tuple[list[int], list[int]]:
    """(first frame that is no probe's, end) of each of the stacks."""
    frames = np.asarray(stacks.frame_indices, np.int32)
    is_probe = np.zeros(len(stacks.frames), bool)
    is_probe[list(probes)] = True
    offsets = np.asarray(stacks.offsets, np.int64)
    at = np.array(numbers, np.int64)
    first, ends = offsets[at], offsets[at + 1]
    going = np.arange(len(at))
    while len(going := going[first[going] < ends[going]]):
        going = going[is_probe[frames[first[going]]]]
        first[going] += 1
    return first.tolist(), ends.tolist()


def _beginning_with(stacks: Stacks, frames: set[int]) -> list[int]:
    """Numbers of the stacks whose innermost frame is one of `frames`."""
    offsets = np.asarray(stacks.offsets, np.int64)
    some = np.flatnonzero(np.diff(offsets))
    leaves = np.asarray(stacks.frame_indices, np.int32)[offsets[:-1][some]]
    found: list[int] = some[np.isin(leaves, np.array(sorted(frames), np.int32))].tolist()
    return found
