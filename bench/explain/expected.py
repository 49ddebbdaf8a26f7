# SPDX-License-Identifier: Apache-2.0
"""What explain must say of each program: bound, words one of which a detail has, needs OS.

Apart from `programs`, which needs PyTorch, so that recorded runs are scored anywhere. `needs OS`:
the device's trace alone cannot tell; it takes the machine's waits.
"""

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
