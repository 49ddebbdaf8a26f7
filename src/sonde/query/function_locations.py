# SPDX-License-Identifier: Apache-2.0
"""Lines of the user's code that functions ran in or were called from."""

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
    """The line of the user's code that most time of each function belongs to: 'step train.py:12'.

    Of a Python function, the line of its frames with the most weight; of any other, the line of the
    user's code under which it had most of its self time. '' where there is none.

    `numbers`: indices of the functions in `session.functions`; `stacks`: distinct indices in
    `session.stacks`; `weight`: of each of these stacks.
    """
    of_frame = np.asarray(session.function_of_frame, np.int64)
    flat = np.asarray(session.stacks.frame_indices, np.int32)
    offsets = np.asarray(session.stacks.offsets, np.int64)
    frames = session.stacks.frames
    depths = offsets[stacks + 1] - offsets[stacks]
    has_frames = depths > 0
    leaves = flat[offsets[stacks[has_frames]]]
    users = session.user_frames[stacks[has_frames]]
    user_frame_of = _heaviest(of_frame[leaves], users, weight[has_frames])
    per_stack = np.zeros(len(session.stacks))
    per_stack[stacks] = weight
    sums = np.bincount(flat, np.repeat(per_stack, np.diff(offsets)), len(frames))
    per_frame: Floats = sums.astype(np.float64)
    frame_of = _heaviest(of_frame[:-1], np.arange(len(frames)), per_frame)
    found = []
    for number in numbers:
        frame = frame_of.get(number, -1)
        if frame < 0 or frames[frame].kind != "python":
            frame = user_frame_of.get(number, -1)
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
