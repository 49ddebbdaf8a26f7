# SPDX-License-Identifier: Apache-2.0
"""Lines of the user's code that functions ran in or were called from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sonde.query.frame_columns import frames_having
from sonde.query.function_weights import frames_of_stacks
from sonde.query.session import Session

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def frames_of_functions(session: Session, numbers: Ints, stacks: Ints, weight: Floats) -> Ints:
    """The frame, in the user's code, that most time of each function belongs to: an index in
    `session.stacks.frames`, -1 none.

    Of a Python function, that of its frames with the most weight; of any other, the frame of the
    user's code under which it had most of its self time.

    `numbers`: indices of the functions in `session.functions`; `stacks`: distinct indices in
    `session.stacks`; `weight`: of each of these stacks.
    """
    of_frame = np.asarray(session.function_of_frame, np.int32)
    frames = session.stacks.frames
    offsets = np.asarray(session.stacks.offsets, np.int32)
    has_frames = offsets[stacks + 1] > offsets[stacks]
    leaves = np.asarray(session.stacks.frame_indices, np.int32)[offsets[stacks[has_frames]]]
    users = session.user_frames[stacks[has_frames]]
    count = len(session.functions)
    user_frame_of = _heaviest(of_frame[leaves], users, weight[has_frames], count)
    per_frame = np.zeros(len(frames))
    for rows, flat, depth in frames_of_stacks(session.stacks, stacks):
        np.add.at(per_frame, flat, np.repeat(weight[rows], depth))
    frame_of = _heaviest(of_frame[:-1], np.arange(len(frames)), per_frame, count)
    found = frame_of[numbers]
    is_python = frames_having(frames, "kind", lambda kind: kind == "python")[found]
    return np.where((found >= 0) & is_python, found, user_frame_of[numbers])


def _heaviest(keys: npt.ArrayLike, values: npt.ArrayLike, weight: Floats, count: int) -> Ints:
    """For each of `count` keys: the value with the largest sum of weights; -1 without any.

    Values are -1 or more.
    """
    pairs = (np.asarray(keys, np.int64) << 32) | (np.asarray(values, np.int64) + 1)
    distinct, inverse = np.unique(pairs, return_inverse=True)
    sums = np.bincount(inverse, weight, len(distinct))
    lightest_first = distinct[np.argsort(sums, kind="stable")]
    found = np.full(count, -1, np.int64)
    found[lightest_first >> 32] = (lightest_first & 0xFFFFFFFF) - 1
    return found
