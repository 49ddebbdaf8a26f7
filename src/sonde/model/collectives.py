# SPDX-License-Identifier: Apache-2.0
"""Kernels of communication libraries, by their names.

NCCL and RCCL (nccl…, rccl…; each of their rings and trees is one), NVSHMEM and rocSHMEM, oneCCL,
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
"""In small letters: a search that ignores case takes four times as long."""


def is_collective(kernel: str) -> bool:
    """Whether a kernel exchanges with other devices: it waits for them, too."""
    return bool(_COLLECTIVE.search(both_ends(kernel).lower()))


_OF_TWO = re.compile(r"send_?recv|nccl.*_(send|recv)\b")


def is_exchange_of_two(kernel: str) -> bool:
    """Whether a kernel sends to, or receives from, single devices: stages of a pipeline do."""
    return is_collective(kernel) and bool(_OF_TWO.search(both_ends(kernel).lower()))
