# SPDX-License-Identifier: Apache-2.0
"""Weights of stacks summed by function: of the innermost one, and of all that are in a stack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from sonde.model.code import Stacks
from sonde.query.session import Session

I32 = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_FRAMES_AT_ONCE = 1 << 19
"""Frames of stacks whose temporary arrays are in memory together."""


def function_weights(
    session: Session, stacks: npt.NDArray[np.int64], weights: Sequence[Floats]
) -> tuple[list[Floats], list[Floats]]:
    """(self weights, total weights): sums over the stacks whose innermost frame is of a function,
    and over those that contain it.

    `stacks`: distinct indices in `session.stacks`; `weights`: columns with a value for each stack.
    A column of sums is returned for each of them, and one more, the number of stacks; its index is
    that of the function in `session.functions`. A function that is in a stack several times counts
    once.
    """
    of_frame = np.asarray(session.function_of_frame, np.int32)
    columns = [*weights, np.ones(len(stacks))]
    count = len(session.functions)
    self_sums, total_sums = ([np.zeros(count) for _ in columns] for _ in range(2))
    for rows, flat, depth in frames_of_stacks(session.stacks, stacks):
        starts = np.cumsum(depth) - depth
        functions = of_frame[flat]
        leaf = np.full(len(rows), of_frame[-1])
        leaf[depth > 0] = functions[starts[depth > 0]]
        pairs = np.repeat(np.arange(len(rows)), depth) * count + functions
        empty = np.flatnonzero(depth == 0) * count + int(of_frame[-1])
        pairs = np.sort(np.concatenate((pairs, empty)))  # `np.unique` takes three times as long
        pairs = pairs[np.diff(pairs, prepend=-1) > 0]
        row, function = np.divmod(pairs, count)
        for number, column in enumerate(columns):
            self_sums[number] += np.bincount(leaf, column[rows], count)
            total_sums[number] += np.bincount(function, column[rows][row], count)
    return self_sums, total_sums


def frames_of_stacks(stacks: Stacks, wanted: Ints) -> Iterator[tuple[Ints, I32, Ints]]:
    """Some stacks at a time: (positions in `wanted`, their frames one after another, how many of
    these each has)."""
    frames = np.asarray(stacks.frame_indices, np.int32)
    offsets = np.asarray(stacks.offsets, np.int32)
    first = offsets[wanted].astype(np.int64)
    depths = offsets[wanted + 1] - first
    block = np.cumsum(depths + 1) // _FRAMES_AT_ONCE
    cuts = np.flatnonzero(np.diff(block)) + 1
    for rows in np.split(np.arange(len(wanted)), cuts):
        depth = depths[rows]
        starts = np.cumsum(depth) - depth
        positions = np.repeat(first[rows] - starts, depth) + np.arange(int(depth.sum()))
        yield rows, frames[positions], depth
