# SPDX-License-Identifier: Apache-2.0
"""What explain must say of each program: bound, words one of which a detail has, needs OS.

Apart from `programs`, which needs PyTorch, so that recorded runs are scored anywhere. `needs OS`:
the device's trace alone cannot tell; it takes the machine's waits.

A program is *bound by* what costs it the most, if all that it waits for costs at least `MATTERS` of
its step; else by what its kernels are limited by. What a cause costs is measured by running the
step without it, and what the program waits for without it is measured then, too (`right_bound`). So
a draw of parameters in which the planted cause hardly costs anything is held against what is true
of it, and not against its name.
"""

from __future__ import annotations

MATTERS = 0.15

EXPECTED: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "small_kernels": ("launch", (), False),
    "item_every_step": ("synchronisation", ("item",), False),
    "pageable_copy": ("copy", ("pageable",), False),
    "copy_bound": ("copy", ("bandwidth",), False),
    "small_copies": ("copy", ("small",), False),
    "slow_loader": ("input", ("__getitem__",), False),
    "one_worker": ("input", (), False),
    "gil_bound": ("lock", ("gil",), True),
    "lock_held": ("lock", ("lock",), True),
    "cpu_rival": ("cpu", ("rival",), True),
    "cpu_quota": ("cpu", ("quota",), True),
    "stopped": ("stopped", (), True),
    "rival_tenant": ("rival", (), False),
    "page_faults": ("page fault", (), True),
    "allocator_churn": ("allocation", (), False),
    "memory_bound": ("memory", (), False),
    "compute_bound": ("compute", (), False),
    "transformer": ("compute", (), False),
    "serialised_streams": ("serial", (), False),
    "graph_replay": ("memory", (), False),
    "triton_small": ("launch", (), False),
    "compiled_pointwise": ("memory", (), False),
    "compiled_item": ("synchronisation", ("item",), False),
    "jax_products": ("compute", (), False),
    "jax_float": ("synchronisation", (), False),
    "host_python": ("host", ("tokenize",), False),
    "checkpoint_fsync": ("io", (), False),
}

PLANTED = {"transformer": "launch"}
"""The cause that is measured, where that is another than the bound of the usual draw: the same step
replayed as a graph is what it is without the host."""
PARTS = {"transformer": ("launch", "host", "cpu")}
"""What a measured cause is made of, where that is not one bound alone: a graph takes away launches,
the code between them, and the hand-over from thread to thread."""
WITHOUT = {"compiled_item": "memory"}
"""What the kernels of a program are limited by, where that is not their arithmetic."""
REST = dict.fromkeys(("lock_held", "cpu_rival", "cpu_quota", "stopped"), "synchronisation")
"""What a program waits for without its cause, where that is not its launches."""


def planted(kind: str) -> str:
    """The bound that the measured cause makes."""
    return PLANTED.get(kind, EXPECTED[kind][0])


def right_bound(kind: str, cost: float | None, rest: float) -> str:
    """What a run is bound by.

    `cost`: of the planted cause, in parts of the step, by the clock; None where there is no step
    without it. `rest`: what the device waits for without it, in parts of the step with it.
    """
    if cost is None:
        return EXPECTED[kind][0]
    if cost + rest < MATTERS:
        return WITHOUT.get(kind, "compute")
    return planted(kind) if cost >= rest else REST.get(kind, "launch")
