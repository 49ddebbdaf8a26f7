# SPDX-License-Identifier: Apache-2.0
"""What kernels are limited by, told from their names, and how full they leave the device."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from sonde.analyze import intervals as sets
from sonde.analyze.idle import Stalls
from sonde.model.name_parts import telling_part
from sonde.model.timeline import DeviceKind, Timeline
from sonde.model.verdict import KernelShare

_MULTIPLIES = re.compile(
    r"gemm|nvjet|cutlass|cublas|xmma|conv(?!ert)|flash|fmha|attention|mma_|wgrad|dgrad|winograd"
    r"|matmul|_bmm|triton_tem|dot_general|_dot_|\bdot_kernel|hgemv_|spin_kernel"
)
"""Products: arithmetic bound at the sizes that matter. In small letters, as `_STREAMS`: a search
that ignores case takes five times as long."""
_STREAMS = re.compile(
    r"elementwise|pointwise|reduce|norm|softmax|copy|fill|cat_?array|concat|index|scan|gather"
    r"|scatter|embedding|transpose|permute|pool|dropout|activation|relu|gelu|tanh|sort|topk|adam"
    r"|sgd|multi_tensor|triton_(poi|red|per)_|fusion|cast|convert|add|mul|sum|axpy|stream|memset"
)
"""Few operations a byte: these stream through memory."""

CLASSES = ("compute", "memory", "kernels")

ACTIVE = 0.5
"""What works for so much of the time is what limits kernels: streaming kernels use 0.7 to 0.9 of
an H200's peak bandwidth, large products keep its tensor cores at work for 0.8 to 0.9."""

UNDERFILLED = 0.5
"""A kernel with fewer thread blocks than this share of the multiprocessors leaves most idle."""
ALONE = 1.3
"""Mean number of kernels at a time, up to which they run one after another."""


def class_of(name: str) -> str:
    """compute, memory, or kernels: those whose name tells neither."""
    name = telling_part(name).lower()
    if _MULTIPLIES.search(name):
        return "compute"
    return "memory" if _STREAMS.search(name) else "kernels"


def class_by_counters(active: Mapping[str, float]) -> str:
    """The same by what the device's own counters say of the time in which it computed, '' for
    nothing: `active`, shares of that time in which memory ("dram") and tensor cores ("tensor")
    worked at their most."""
    name, share = max(active.items(), key=lambda item: item[1], default=("", 0.0))
    if share < ACTIVE:
        return ""
    return "memory" if name == "dram" else "compute"


def classes_of(timeline: Timeline, stalls: Stalls) -> list[KernelShare]:
    """Kernel time by class, largest first."""
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
    for number, name in enumerate(CLASSES):
        of = mine == number
        ns = int(duration[of].sum())
        found.append(KernelShare(name, ns, ns / window, int(of.sum())))
    return sorted(found, key=lambda one: -one.ns)


def top_kernels(timeline: Timeline, stalls: Stalls, limit: int = 5) -> list[KernelShare]:
    """The kernels with the most time."""
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
    """(share of the kernel time with one small kernel alone on the device, streams they use)."""
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
    return busy.total / stalls.computing.total, len(np.unique(events.lane[small]))
