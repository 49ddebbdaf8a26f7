# SPDX-License-Identifier: Apache-2.0
"""Stacks as flame graphs show them: frames from the root on, and a label on top of the leaf."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from sonde.errors import CaptureTooLarge
from sonde.model.code import Stacks
from sonde.model.profile import Profile, ProfileKind, ProfileRow
from sonde.query.frame_columns import frames_having
from sonde.query.grouping import grouped

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_FRAMES_AT_ONCE = 1 << 19
"""Frames in one block of stacks, about."""

MAX_FRAMES = 100_000_000
"""In all rows of a profile together. An hour on a large machine has some ten million."""


def check_size(profile: Profile) -> None:
    """Raise CaptureTooLarge where a profile written stack by stack would be far too large.

    A hostile capture can refer to one deep stack from any number of rows.
    """
    depths = np.diff(np.asarray(profile.stacks.offsets, np.int64))
    if int(depths[np.asarray(profile.row_stack, np.int64)].sum()) > MAX_FRAMES:
        raise CaptureTooLarge(
            f"the stacks of this capture have more than {MAX_FRAMES:,} frames in all",
            "choose a process (--pid), a metric, or a part of the time (--from, --to); or use "
            "--format html, which writes what stacks share once",
        )


def leaf_label(profile: Profile, row: ProfileRow) -> str:
    """The label on top of a stack: the reason of a wait, the API call, or the GPU kernel.

    '' for on-CPU stacks, and where the leaf frame is the API call itself.
    """
    if not row.name:
        return ""
    if profile.kind == ProfileKind.GPU_TIME:
        return row.name
    if profile.kind == ProfileKind.GPU_CALLS:
        frames = profile.stacks.indices(row.stack)
        leaf = profile.stacks.frames[frames[0]].function if frames else ""
        return "" if leaf == row.name else row.name
    return f"({row.name})"


def leaf_labels(profile: Profile) -> tuple[list[str], I64]:
    """(distinct labels, in the order of the rows in which each is first; for each row, the index of
    its `leaf_label` in these, -1 where that is '')."""
    names = np.asarray(profile.row_name, np.int64)
    keys = names
    if profile.kind == ProfileKind.GPU_CALLS:
        keys = (np.asarray(profile.row_stack, np.int64) << 32) | names
    distinct, index = grouped(keys)
    numbers: dict[str, int] = {}
    codes = []
    for key in distinct.tolist():
        name = profile.names[key & 0xFFFFFFFF]
        text = leaf_label(profile, ProfileRow(0, key >> 32, name, 0, 0, 0))
        codes.append(numbers.setdefault(text, len(numbers)) if text else -1)
    return [*numbers], np.array(codes, np.int64)[index]


def summed(values: Sequence[int], group: I64, groups: int) -> list[int]:
    """As `sums_of`, as a list."""
    sums = sums_of(values, group, groups)
    return sums if isinstance(sums, list) else sums.tolist()


def sums_of(values: Sequence[int], group: I64, groups: int) -> I64 | list[int]:
    """The sum of the values of each group, exact however large they are: a list where they are too
    large for an array. `group`: of each value."""
    found = np.zeros(groups, np.int64)
    column = np.asarray(values, np.int64)
    if len(column) and float(np.abs(column.astype(np.float64)).sum()) < 1 << 62:
        np.add.at(found, group, column)
        return found
    sums = [0] * groups
    for number, value in zip(group.tolist(), column.tolist(), strict=True):
        sums[number] += value
    return sums


def distinct_stacks(profiles: Sequence[Profile]) -> I64:
    """The stacks that the profiles have, ascending."""
    rows = [np.asarray(profile.row_stack, np.int64) for profile in profiles]
    return np.unique(np.concatenate(rows)) if rows else np.zeros(0, np.int64)


def root_first_blocks(stacks: Stacks, wanted: I64) -> Iterator[tuple[I64, I32, I64]]:
    """Many stacks at once: (stacks, their frames, end of each in those).

    The frames of a stack are outermost first, as a flame graph shows them. Only the binary of
    frames without a symbol is known, so a run of them in one binary is one frame. No frames where
    no stack was recorded.
    """
    frames = np.asarray(stacks.frame_indices, np.int32)
    offsets = np.asarray(stacks.offsets, np.int64)
    nameless = _nameless(stacks)
    depths = (offsets[1:] - offsets[:-1])[wanted]
    block = np.cumsum(depths + 1) // _FRAMES_AT_ONCE
    cuts = np.flatnonzero(np.diff(block)) + 1
    for numbers, depth in zip(np.split(wanted, cuts), np.split(depths, cuts), strict=True):
        ends = np.cumsum(depth)
        starts = ends - depth
        whole = int(ends[-1]) if len(ends) else 0
        at = np.repeat(offsets[numbers + 1] - 1 + starts, depth) - np.arange(whole)
        flat = frames[at]
        code = nameless[flat]
        again = np.zeros(whole, bool)
        again[1:] = (code[1:] > 0) & (code[1:] == code[:-1])
        again[starts[depth > 0]] = False
        shown = np.concatenate((np.zeros(1, np.int64), np.cumsum(~again)))
        yield numbers, flat[~again], shown[ends]


def _nameless(stacks: Stacks) -> I32:
    """For each frame: 0 where it has a function, else a number of what is shown instead."""
    numbers: dict[str, int] = {}
    found = np.zeros(len(stacks.frames), np.int32)
    without = frames_having(stacks.frames, "function", lambda function: not function)
    for frame in np.flatnonzero(without).tolist():
        name = stacks.frames[frame].name
        found[frame] = numbers.setdefault(name, len(numbers) + 1)
    return found


def with_no_stack(flat: I32, depth: I64, no_stack: int) -> tuple[I32, I64]:
    """The frames and depths of stacks, with one frame `no_stack` in those without any."""
    empty = np.flatnonzero(depth == 0)
    if not len(empty):
        return flat, depth
    at = (np.cumsum(depth) - depth)[empty]
    return np.insert(flat, at, no_stack).astype(np.int32), np.maximum(depth, 1)


def first_rows(index: I64) -> I64:
    """The rows in which each number is first, of numbers in order of appearance."""
    return np.flatnonzero(np.diff(np.maximum.accumulate(index), prepend=-1))


def first_of_each(values: npt.NDArray[np.integer], wanted: Mask) -> tuple[I64, I64]:
    """(the distinct values among the wanted ones, in the order of their first positions; these
    positions, ascending)."""
    at = np.flatnonzero(wanted)
    distinct, first = np.unique(values[at], return_index=True)
    order = np.argsort(first)
    return distinct[order].astype(np.int64), at[first[order]]
