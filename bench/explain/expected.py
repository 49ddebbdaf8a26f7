# SPDX-License-Identifier: Apache-2.0
"""The right verdict on each program: bound, expected words, and whether it needs a capture.

Separate from `programs`, which needs PyTorch, so that recorded runs are scored on any machine.

A program is bound by what costs it the most, if all of its stalls cost at least `MATTERS` of a
step; otherwise by what limits its kernels. The cost of a cause is measured by running the step
without it; the stalls that remain without it are measured in the same run (`right_bound`). So if
the drawn parameters make the planted cause cheap, the expected verdict follows the measurement, not
the name of the program.
"""

from __future__ import annotations

from sonde.model.causes import Bound

MATTERS = 0.15
"""Share of a step from which on stalls are the bound."""

EXPECTED: dict[str, tuple[Bound, tuple[str, ...], bool]] = {
    "small_kernels": (Bound.LAUNCH, (), False),
    "item_every_step": (Bound.SYNCHRONIZATION, ("item",), False),
    "pageable_copy": (Bound.COPY, ("pageable",), False),
    "copy_bound": (Bound.COPY, ("bandwidth",), False),
    "small_copies": (Bound.COPY, ("small",), False),
    "slow_loader": (Bound.INPUT, ("__getitem__",), False),
    "one_worker": (Bound.INPUT, (), False),
    "gil_bound": (Bound.LOCK, ("gil",), True),
    "lock_held": (Bound.LOCK, ("lock",), True),
    "cpu_rival": (Bound.CPU_CONTENTION, ("preempted",), True),
    "cpu_quota": (Bound.CPU_CONTENTION, ("quota",), True),
    "stopped": (Bound.STOPPED, (), True),
    "rival_tenant": (Bound.GPU_CONTENTION, (), False),
    "page_faults": (Bound.PAGE_FAULT, (), True),
    "allocator_churn": (Bound.ALLOCATION, (), False),
    "memory_bound": (Bound.MEMORY, (), False),
    "compute_bound": (Bound.COMPUTE, (), False),
    "transformer": (Bound.COMPUTE, (), False),
    "serialised_streams": (Bound.SMALL_KERNELS, (), False),
    "graph_replay": (Bound.MEMORY, (), False),
    "triton_small": (Bound.LAUNCH, (), False),
    "compiled_pointwise": (Bound.MEMORY, (), False),
    "compiled_item": (Bound.SYNCHRONIZATION, ("item",), False),
    "jax_products": (Bound.COMPUTE, (), False),
    "jax_float": (Bound.SYNCHRONIZATION, (), False),
    "host_python": (Bound.HOST, ("tokenize",), False),
    "checkpoint_fsync": (Bound.IO, (), False),
}

PLANTED = {"transformer": Bound.LAUNCH}
"""The measured bound, where it differs from the bound with typical parameters: the same step
replayed as a CUDA graph is the step without host time."""
PARTS = {"transformer": (Bound.LAUNCH, Bound.HOST, Bound.CPU_CONTENTION)}
"""The bounds that a measured cause consists of, where there are several: a CUDA graph removes
launches, the code between them, and switches between threads."""
WITHOUT = {"compiled_item": Bound.MEMORY}
"""What limits the kernels of a program, where it is not arithmetic."""
REST = dict.fromkeys(("lock_held", "cpu_rival", "cpu_quota", "stopped"), Bound.SYNCHRONIZATION)
"""The bound without the planted cause, where it is not launches."""


UNPROVED = {Bound.GPU_CONTENTION: Bound.NOT_TAKEN}
"""What is right where a record does not show how much other processes used the device."""


def is_right(found: Bound, expected: Bound, has_reports: bool) -> bool:
    """Whether a verdict is right. `has_reports`: the driver reported on processes."""
    return found == expected or (not has_reports and found == UNPROVED.get(expected))


def planted(kind: str) -> Bound:
    """The bound of the measured cause."""
    return PLANTED.get(kind, EXPECTED[kind][0])


def right_bound(kind: str, cost: float | None, rest: float) -> Bound:
    """The right bound of a run.

    `cost`: of the planted cause, as a share of the step, measured; None without a step that lacks
    the cause. `rest`: stalls that remain without it, as a share of the step with it.
    """
    if cost is None:
        return EXPECTED[kind][0]
    if cost + rest < MATTERS:
        return WITHOUT.get(kind, Bound.COMPUTE)
    return planted(kind) if cost >= rest else REST.get(kind, Bound.LAUNCH)
