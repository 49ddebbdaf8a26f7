# SPDX-License-Identifier: Apache-2.0
"""Removes the frames of Sonde's BPF programs from stacks of waits.

The stack of a wait is recorded inside the scheduler's tracepoint, so its innermost frames are the
tracepoint and the BPF program, while the thread itself was in the scheduler. On-CPU samples keep
such frames: there they are CPU time that was spent.
"""

from __future__ import annotations

from array import array

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
    added: dict[tuple[int, ...], int] = {}
    for number in range(len(stacks)):
        indices = stacks.indices(number)
        depth = 0
        while depth < len(indices) and indices[depth] in probes:
            depth += 1
        if not depth:
            continue
        bare = tuple(indices[depth:])
        if bare not in added:
            added[bare] = len(offsets) - 1
            frame_indices.extend(bare)
            offsets.append(len(frame_indices))
        instead[number] = added[bare]
    return Stacks(stacks.frames, memoryview(offsets), memoryview(frame_indices)), instead
