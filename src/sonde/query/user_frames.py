# SPDX-License-Identifier: Apache-2.0
"""The frame of the user's Python code of each stack (`sonde.model.user_code`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sonde.model.code import Frame, Stacks
from sonde.model.user_code import RANKS, is_binary_of_sonde, rank_of
from sonde.query.frame_columns import FrameColumns, frames_having

Ints = npt.NDArray[np.int64]


def user_frames(stacks: Stacks) -> Ints:
    """The index in `stacks.frames` of the frame of the user's code of each stack; -1 where it has
    no Python."""
    ranks = _ranks(stacks.frames)
    found = np.full(len(stacks), -1, np.int64)
    stack_of = _stack_of(stacks)
    for rank in RANKS:
        found = np.where(found < 0, _innermost(stacks, ranks == rank, stack_of), found)
    return found


def _ranks(frames: Sequence[Frame]) -> npt.NDArray[np.int8]:
    """The rank of each frame (`rank_of`)."""
    if not isinstance(frames, FrameColumns):
        return np.fromiter(map(rank_of, frames), np.int8, len(frames))
    is_python = frames_having(frames, "kind", lambda kind: kind == "python")
    first, index = frames.distinct(("kind", "function", "file", "origin"))
    ranks = np.zeros(len(first), np.int8)
    for number in np.flatnonzero(is_python[first]).tolist():
        ranks[number] = rank_of(frames[int(first[number])])
    return ranks[index]


def waits_of_sonde(stacks: Stacks, users: Ints) -> npt.NDArray[np.bool_]:
    """Which stacks are in Sonde's library and in no Python code; `users`: by `user_frames`."""
    frames = stacks.frames
    is_sonde = frames_having(frames, "binary", is_binary_of_sonde)
    is_sonde &= frames_having(frames, "kind", lambda kind: kind == "user")
    if not is_sonde.any():
        return np.zeros(len(stacks), np.bool_)
    return (users < 0) & (_innermost(stacks, is_sonde, _stack_of(stacks)) >= 0)


def _stack_of(stacks: Stacks) -> npt.NDArray[np.int32]:
    """The stack of each of `frame_indices`."""
    offsets = np.asarray(stacks.offsets, np.int64)
    lengths: Ints = offsets[1:] - offsets[:-1]
    return np.repeat(np.arange(len(stacks), dtype=np.int32), lengths)


def _innermost(
    stacks: Stacks, mask: npt.NDArray[np.bool_], stack_of: npt.NDArray[np.int32]
) -> Ints:
    """The index of each stack's innermost frame that is in a mask of frames; -1 none. `stack_of`:
    as `_stack_of` returns it."""
    found = np.full(len(stacks), -1, np.int64)
    flat = np.asarray(stacks.frame_indices, np.int32)
    if not len(flat) or not mask.any():
        return found
    positions = np.flatnonzero(mask[flat])
    found[stack_of[positions[::-1]]] = flat[positions[::-1]]
    return found
