# SPDX-License-Identifier: Apache-2.0
"""Which GPU a process means by a number (its ordinal), and which GPUs two records share."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

_NOT_HEX = re.compile(r"[^0-9a-f]")


def index_of(gpus: Sequence[int], ordinals: Sequence[int]) -> dict[int, int]:
    """By ordinal of a device that a process launched on: the index that the driver gives the GPU.

    `gpus`: indices of the GPUs that hold memory of the process, ascending; `ordinals`: those it
    launched on. A process numbers the devices that it may see (CUDA_VISIBLE_DEVICES) from 0 on.
    Where `gpus` does not show which those are, its ordinals are taken as indices.
    """
    used = sorted(set(ordinals))
    if len(used) == len(gpus):
        return dict(zip(used, gpus, strict=True))
    if set(used) <= set(gpus) or not used or used[-1] >= len(gpus):
        return {one: one for one in used}
    return {one: gpus[one] for one in used}


def same_devices(
    ours: Mapping[int, Collection[str]], theirs: Mapping[int, Collection[str]]
) -> dict[int, int]:
    """By number in `theirs`: the number in `ours` of the device with an id or address in common.

    Ids are compared by their digits: 'GPU-0a…' and '0a…', 0000:1B:00.0 and 00000000:1b:00.0.
    """
    known = {
        _normalized(one): number for number, ids in ours.items() for one in ids if _normalized(one)
    }
    return {
        number: known[_normalized(one)]
        for number, ids in theirs.items()
        for one in ids
        if _normalized(one) in known
    }


def _normalized(name: str) -> str:
    return _NOT_HEX.sub("", name.lower().removeprefix("gpu-")).lstrip("0")
