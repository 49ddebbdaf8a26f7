# SPDX-License-Identifier: Apache-2.0
"""What limits kernels, by their names or by counters, and how well they fill the device."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from sonde.analyze import intervals as sets
from sonde.analyze.stalls import Stalls
from sonde.model.causes import Bound
from sonde.model.name_parts import both_ends
from sonde.model.timeline import DeviceKind, Timeline
from sonde.model.verdict import KernelClassShare, KernelShare

_COMPUTE_BOUND = re.compile(
    r"gemm|nvjet|cutlass|cublas|xmma|conv(?!ert)|flash|fmha|attention|mma_|wgrad|dgrad|winograd"
    r"|matmul|_bmm|triton_tem|dot_general|_dot_|\bdot_kernel|hgemv_|spin_kernel"
)
"""Matrix products and the like, at sizes that matter. For names in lower case, as `_MEMORY_BOUND`:
a search that ignores case takes five times as long."""
_MEMORY_BOUND = re.compile(
    r"elementwise|pointwise|reduce|norm|softmax|copy|fill|cat_?array|concat|index|scan|gather"
    r"|scatter|embedding|transpose|permute|pool|dropout|activation|relu|gelu|tanh|sort|topk|adam"
    r"|sgd|multi_tensor|triton_(poi|red|per)_|fusion|cast|convert|add|mul|sum|axpy|stream|memset"
)
"""Few operations per byte."""

CLASSES = (Bound.COMPUTE, Bound.MEMORY, Bound.KERNELS)
"""What may limit a kernel; `Bound.KERNELS`: not known."""

ACTIVE = 0.5
"""A unit that is active for this share of the time limits the kernels: streaming kernels use 0.7 to
0.9 of the peak bandwidth of an H200, large products its tensor cores for 0.8 to 0.9."""

UNDERFILLED = 0.5
"""A kernel with fewer thread blocks than this share of the multiprocessors is small."""
ALONE = 1.3
"""Up to this mean number of kernels at a time, they run one after another."""


def class_of(name: str) -> Bound:
    """What limits a kernel, by its name; `Bound.KERNELS` where the name does not show it."""
    name = both_ends(name).lower()
    if _COMPUTE_BOUND.search(name):
        return Bound.COMPUTE
    return Bound.MEMORY if _MEMORY_BOUND.search(name) else Bound.KERNELS


def class_by_counters(active: Mapping[Bound, float]) -> Bound | None:
    """What limits kernels, by hardware counters; None where they do not show it.

    `active`: shares of the computing time in which memory (`Bound.MEMORY`) and tensor cores
    (`Bound.COMPUTE`) were active.
    """
    if not active:
        return None
    bound, share = max(active.items(), key=lambda item: item[1])
    return bound if share >= ACTIVE else None


def classes_of(timeline: Timeline, stalls: Stalls) -> list[KernelClassShare]:
    """Kernel time by what limits the kernels, largest first."""
    events = stalls.events
    rows = events.kind == DeviceKind.KERNEL
    used = np.flatnonzero(np.bincount(events.name[rows], minlength=1))
    code = np.zeros(len(timeline.names) + 1, np.uint8)
    for number in used.tolist() if rows.any() else []:
        code[number] = CLASSES.index(class_of(timeline.names[number]))
    mine = code[events.name[rows]]
    duration = events.duration_ns[rows]
    window = max(1, stalls.window_ns)
    found = []
    for number, bound in enumerate(CLASSES):
        of = mine == number
        ns = int(duration[of].sum())
        found.append(KernelClassShare(bound, ns, ns / window, int(of.sum())))
    return sorted(found, key=lambda one: -one.ns)


def top_kernels(timeline: Timeline, stalls: Stalls, limit: int = 5) -> list[KernelShare]:
    """The kernels with the most time, by name, largest first."""
    events = stalls.events
    rows = events.kind == DeviceKind.KERNEL
    count = len(timeline.names)
    ns = np.bincount(events.name[rows], events.duration_ns[rows], count)
    times = np.bincount(events.name[rows], minlength=count)
    window = max(1, stalls.window_ns)
    return [
        KernelShare(timeline.names[i], int(ns[i]), float(ns[i] / window), int(times[i]))
        for i in np.argsort(-ns)[:limit].tolist()
        if ns[i] > 0
    ]


def underfilled_share(timeline: Timeline, stalls: Stalls) -> tuple[float, int]:
    """(share of the kernel time in which one small kernel ran alone, number of their streams)."""
    events = stalls.events
    processors = timeline.multiprocessors.get(stalls.device, 0)
    kernels = events.kind == DeviceKind.KERNEL
    small = kernels & (events.blocks > 0) & (events.blocks < UNDERFILLED * processors)
    if not small.any() or not stalls.computing.total:
        return 0.0, 0
    busy = sets.union(events.start_ns[small], events.end_ns[small])
    together = float(events.duration_ns[small].sum()) / max(1, busy.total)
    if together > ALONE:
        return 0.0, 0
    return busy.total / stalls.computing.total, len(np.unique(events.track[small]))
