# SPDX-License-Identifier: Apache-2.0
"""Which stacks wait for the next connection, request or task, in a capture that is reported on: as
`stack_roles` finds them for a verdict."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import numpy as np
import numpy.typing as npt

from sonde.model.code import Stacks
from sonde.model.serving import LOOPS, WAITING_FILES, ServingRole, native_role
from sonde.query.frame_columns import frames_having
from sonde.query.function_weights import frames_of_stacks

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def wait_for_requests(stacks: Stacks, wanted: Ints) -> Mask:
    """Whether each of these stacks, by number, waits so; shape (wanted,)."""
    frames = stacks.frames
    is_python = frames_having(frames, "kind", lambda kind: kind == "python")
    waits = is_python & frames_having(frames, "file", lambda file: file in WAITING_FILES)
    takes = np.zeros(len(is_python), bool)
    for file, names in LOOPS.items():
        in_file = frames_having(frames, "file", file.__eq__)
        if in_file.any():
            takes |= in_file & frames_having(frames, "function", partial(_is_one_of, names))
    takes &= is_python
    accepts, events = (
        frames_having(frames, "kind", ("user", "inlined").__contains__)
        & frames_having(frames, "function", partial(_has_role, role))
        for role in (ServingRole.ACCEPT, ServingRole.EVENTS)
    )
    found = np.zeros(len(wanted), bool)
    for rows, flat, depth in frames_of_stacks(stacks, wanted):
        row = np.repeat(np.arange(len(rows)), depth)
        # The innermost code of Python that does not wait on behalf of its caller decides.
        shown = np.flatnonzero((is_python & ~waits)[flat])[::-1]
        innermost = np.full(len(rows), -1, np.int64)
        innermost[row[shown]] = flat[shown]
        in_loop = (innermost >= 0) & takes[innermost]
        of = [np.bincount(row[one[flat]], minlength=len(rows)) > 0 for one in (accepts, events)]
        has_python = np.bincount(row[is_python[flat]], minlength=len(rows)) > 0
        found[rows] = in_loop | of[0] | (of[1] & ~has_python)
    return found


def _is_one_of(names: Collection[str], function: str) -> bool:
    """Whether a qualified name of a function is that of one of these."""
    return function.rpartition(".")[2] in names


def _has_role(role: ServingRole, function: str) -> bool:
    return native_role(function) == role
