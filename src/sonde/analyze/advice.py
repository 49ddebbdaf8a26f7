# SPDX-License-Identifier: Apache-2.0
"""The recommended next step for each cause and each bound: data."""

from __future__ import annotations

from collections.abc import Mapping

from sonde.model.causes import Bound, Cause, CauseDetail

OF_CAUSE: Mapping[tuple[Cause, CauseDetail], str] = {
    (Cause.STOPPED, CauseDetail.NONE): "find what stops the process: signals, a debugger, or the "
    "freezer of its control group",
    (Cause.RUN_QUEUE, CauseDetail.NONE): "reserve a CPU for the launching thread: pin it, or move "
    "other work to other CPUs",
    (
        Cause.RUN_QUEUE,
        CauseDetail.QUOTA,
    ): "raise the CPU quota: it is spent before each period ends",
    (Cause.INPUT, CauseDetail.NONE): "prepare batches ahead and in parallel: more loader workers, "
    "prefetching, less work per sample",
    (Cause.ALLOCATION, CauseDetail.NONE): "keep memory allocated: no empty_cache() in the loop, "
    "fixed shapes, expandable segments, or a larger pool",
    (Cause.BUILD, CauseDetail.NONE): "compile, load and capture before the loop, and keep what "
    "was built",
    (
        Cause.PAGE_FAULT,
        CauseDetail.NONE,
    ): "reuse host buffers instead of mapping new ones, or touch them ahead; use huge pages",
    (Cause.GIL, CauseDetail.NONE): "move the work of other Python threads into processes",
    (Cause.LOCK, CauseDetail.NONE): "hold the lock for a shorter time, or do not take it in the "
    "launching thread",
    (Cause.IO, CauseDetail.NONE): "do the I/O in another thread or process than the launching one",
    (Cause.SLEEP, CauseDetail.NONE): "remove the sleep from the launching thread",
    (
        Cause.SYNCHRONIZATION,
        CauseDetail.NONE,
    ): "read results back later or less often: keep them on "
    "the device, copy non-blocking, log every n-th step",
    (Cause.COPY, CauseDetail.NONE): "copy from pinned memory on a separate stream, a batch ahead",
    (Cause.COPY, CauseDetail.PAGEABLE): "pin the host memory and copy non-blocking, a batch ahead",
    (Cause.COPY, CauseDetail.SMALL): "merge small copies into one, or create the values on the "
    "device",
    (Cause.COPY, CauseDetail.BANDWIDTH): "copy fewer bytes (smaller types, decode on the device), "
    "or copy a batch ahead on a separate stream",
    (Cause.COLLECTIVE, CauseDetail.NONE): "overlap communication with computation; look for the "
    "rank that comes last",
    (Cause.LAUNCH, CauseDetail.NONE): "launch fewer kernels: CUDA graphs, torch.compile, fused "
    "kernels, larger batches",
    (Cause.KERNEL_GAP, CauseDetail.NONE): "fuse small kernels, or capture them in one CUDA graph",
    (Cause.HOST, CauseDetail.NONE): "move this code out of the loop, make it faster, or run it "
    "while the device works",
    (Cause.GPU_CONTENTION, CauseDetail.NONE): "give the process a GPU without co-tenants, or share "
    "it by MPS or MIG",
    (
        Cause.NOT_TAKEN,
        CauseDetail.NONE,
    ): "record with Sonde on the machine: it shows which processes use the device; look for events "
    "that streams wait for",
    (Cause.DEPENDENCY, CauseDetail.NONE): "let fewer streams wait for one another across devices, "
    "or record the event earlier",
    (
        Cause.UNKNOWN,
        CauseDetail.NONE,
    ): "record with Sonde beside the profiler: it shows why threads were off-CPU",
}
"""By cause and detail; a detail without an entry has the entry of the cause."""

OF_BOUND: Mapping[tuple[Bound, CauseDetail], str] = {
    (
        Bound.COMPUTE,
        CauseDetail.NONE,
    ): "use fewer or cheaper operations: lower precision, sparsity, "
    "a better kernel for the first one",
    (Bound.KERNELS, CauseDetail.NONE): "make the first kernel faster: a profiler of hardware "
    "counters (Nsight Compute) shows its limit",
    (Bound.MEMORY, CauseDetail.NONE): "move fewer bytes: fuse elementwise work (torch.compile), "
    "smaller types, recompute instead of reload",
    (
        Bound.DEVICE,
        CauseDetail.NONE,
    ): "trace the device (torch.profiler) and explain the trace with this capture",
    (Bound.THROTTLED, CauseDetail.TEMPERATURE): "cool the GPU: check fans, airflow, inlet "
    "temperature, and other heat sources nearby",
    (Bound.THROTTLED, CauseDetail.POWER_BRAKE): "check the power supplies and the power budget of "
    "chassis and rack: they asked the GPU for less power",
    (Bound.THROTTLED, CauseDetail.HARDWARE): "the driver does not report what slows the clocks: "
    "check temperature (nvidia-smi -q -d TEMPERATURE), power supplies and power cables",
    (
        Bound.THROTTLED,
        CauseDetail.BOARD,
    ): "nothing to set right: the voltage that the board may use "
    "limits the clocks; where other GPUs of the model are faster, see the vendor",
    (Bound.THROTTLED, CauseDetail.OTHER_LIMIT): "look up the reason at the driver "
    "(nvidia-smi -q -d PERFORMANCE)",
    (Bound.THROTTLED, CauseDetail.NONE): "raise the power limit where the board allows it, or use "
    "fewer operations: power, not arithmetic, is the limit",
    (Bound.SMALL_KERNELS, CauseDetail.NONE): "run independent kernels on several streams at once, "
    "batch them, or make each larger",
}
"""By bound and detail, of bounds that are about the device's own work."""


def next_step(cause: Cause, detail: CauseDetail = CauseDetail.NONE) -> str:
    """What to do about a cause."""
    return OF_CAUSE.get((cause, detail)) or OF_CAUSE[cause, CauseDetail.NONE]


def next_step_of_bound(bound: Bound, detail: CauseDetail = CauseDetail.NONE) -> str:
    """What to do about a bound of the device's own work."""
    return OF_BOUND.get((bound, detail)) or OF_BOUND[bound, CauseDetail.NONE]
