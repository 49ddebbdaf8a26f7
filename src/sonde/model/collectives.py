# SPDX-License-Identifier: Apache-2.0
"""Kernels of communication libraries, by their names.

NCCL and RCCL (nccl…, rccl…), NVSHMEM and rocSHMEM, oneCCL,
MSCCL++, DeepEP, and the kernels that frameworks write themselves for small all-reduces over NVLink.
"""

from __future__ import annotations

import re

from sonde.model.name_parts import both_ends

_COLLECTIVE = re.compile(
    r"nccl|rccl|nvshmem|roc_?shmem|mscclpp|oneccl|deep_ep"
    r"|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device_reduce"
    r"|multimem_|send_?recv|barrier_(on_stream|all)"
)
"""For names in lower case: a search that ignores case takes four times as long."""


def is_collective(kernel: str) -> bool:
    """Whether a kernel exchanges data with other devices (sends and receives between two, too), and
    so waits for them."""
    return bool(_COLLECTIVE.search(both_ends(kernel).lower()))


_SEND_OR_RECEIVE = re.compile(r"send_?recv|nccl.*_(send|recv)\b")


def is_point_to_point(kernel: str) -> bool:
    """Whether a kernel sends to, or receives from, single devices, as stages of a pipeline do."""
    return is_collective(kernel) and bool(_SEND_OR_RECEIVE.search(both_ends(kernel).lower()))
