# SPDX-License-Identifier: Apache-2.0
"""The code of the user that functions ran in or were called from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sonde.query.session import Session

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def locations_of_functions(
    session: Session, numbers: Sequence[int], stacks: Ints, weight: Floats
) -> list[str]:
    """Where most time of some functions was spent in the user's code: 'step train.py:12'.

    That of a Python function is its own; of another one, that of the user's code which most of its
    self time was spent for. '' where there is none.

    `numbers`: in `session.functions`; `stacks`: distinct indices; `weight`: of each.
    """
    of_frame = np.asarray(session.function_of_frame, np.int64)
    flat = np.asarray(session.stacks.frame_indices, np.int32)
    offsets = np.asarray(session.stacks.offsets, np.int64)
    frames = session.stacks.frames
    depths = offsets[stacks + 1] - offsets[stacks]
    some = depths > 0
    leaves = flat[offsets[stacks[some]]]
    users = session.user_frames[stacks[some]]
    heaviest = _heaviest(of_frame[leaves], users, weight[some])
    per_stack = np.zeros(len(session.stacks))
    per_stack[stacks] = weight
    every_depth = np.diff(offsets)
    sums = np.bincount(flat, np.repeat(per_stack, every_depth), len(frames))
    per_frame: Floats = sums.astype(np.float64)
    own = np.arange(len(frames))
    lines = _heaviest(of_frame[:-1], own, per_frame)
    found = []
    for number in numbers:
        line = lines.get(number, -1)
        frame = line if line >= 0 and frames[line].kind == "python" else heaviest.get(number, -1)
        found.append(frames[frame].location if frame >= 0 else "")
    return found


def _heaviest(keys: npt.ArrayLike, values: npt.ArrayLike, weight: Floats) -> dict[int, int]:
    """By key: the value with the largest sum of weights."""
    pairs = np.stack([np.asarray(keys, np.int64), np.asarray(values, np.int64)], axis=1)
    if not len(pairs):
        return {}
    distinct, inverse = np.unique(pairs, axis=0, return_inverse=True)
    sums = np.bincount(inverse.reshape(-1), weight, len(distinct))
    order = np.argsort(sums, kind="stable")
    return {int(key): int(value) for key, value in distinct[order].tolist()}
