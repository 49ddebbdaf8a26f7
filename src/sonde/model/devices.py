# SPDX-License-Identifier: Apache-2.0
"""Which GPU a process means by a number: it counts those that it may see from 0 on."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

_NO_ID = re.compile(r"[^0-9a-f]")


def index_of(gpus: Sequence[int], ordinals: Sequence[int]) -> dict[int, int]:
    """Index of each device that a process launched on, from its own ordinals and what it holds.

    A process counts the devices that it may see (CUDA_VISIBLE_DEVICES) from 0 on. Where nothing
    lists which those are, its ordinals stand for indices.
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
    """Our number of each of their devices that has an id or an address in common with one of ours.

    Ids are compared by their digits: 'GPU-0a…' and '0a…', 0000:1B:00.0 and 00000000:1b:00.0.
    """
    known = {_plain(one): number for number, ids in ours.items() for one in ids if _plain(one)}
    return {
        number: known[_plain(one)]
        for number, ids in theirs.items()
        for one in ids
        if _plain(one) in known
    }


def _plain(name: str) -> str:
    return _NO_ID.sub("", name.lower().removeprefix("gpu-")).lstrip("0")
