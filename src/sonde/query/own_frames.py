# SPDX-License-Identifier: Apache-2.0
"""The frame of a stack that shows most of what a thread did there."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sonde.model.code import Frame, Stacks
from sonde.query.frame_columns import frames_having
from sonde.query.function_weights import frames_of_stacks

Ints = npt.NDArray[np.int64]

RUNTIME_LIBRARIES = ("libc.so", "libc-2.", "libpthread", "ld-linux", "ld-musl", "[vdso]")
"""Beginnings of the names of binaries: C's runtime, and the vdso. The innermost user frame of a
waiting thread is nearly always in one of them; its caller shows more."""


def own_frame(stacks: Stacks, stack: int) -> Frame | None:
    """The innermost frame with a function that is not of the kernel or the C library.

    Without one: the innermost frame of such a binary without a symbol; else the innermost function
    of the C library; else none.
    """
    without_symbol = runtime = None
    for index in stacks.indices(stack):
        frame = stacks.frames[index]
        if frame.kind == "kernel":
            continue
        if not frame.binary.startswith(RUNTIME_LIBRARIES):
            if frame.function:
                return frame
            if without_symbol is None and frame.binary and not frame.binary.startswith("["):
                without_symbol = frame
        elif runtime is None and frame.function:
            runtime = frame
    return without_symbol or runtime


def own_frames(stacks: Stacks, wanted: Ints) -> Ints:
    """The index in `stacks.frames` of the own frame (`own_frame`) of each of the stacks; -1 none.

    `wanted`: numbers of stacks; shape (wanted,), as the result.
    """
    frames = stacks.frames
    is_code = ~frames_having(frames, "kind", lambda kind: kind == "kernel")
    is_runtime = frames_having(frames, "binary", lambda name: name.startswith(RUNTIME_LIBRARIES))
    is_named = frames_having(frames, "function", bool)
    is_file = frames_having(frames, "binary", lambda name: bool(name) and not name.startswith("["))
    # The first of these that any frame of a stack is.
    kinds = (
        is_code & ~is_runtime & is_named,
        is_code & ~is_runtime & ~is_named & is_file,
        is_code & is_runtime & is_named,
    )
    found = np.full(len(wanted), -1, np.int64)
    for rows, flat, depth in frames_of_stacks(stacks, wanted):
        row = np.repeat(rows, depth)
        for is_kind in kinds[::-1]:
            at = np.flatnonzero(is_kind[flat])[::-1]
            found[row[at]] = flat[at]  # the last one stays: the innermost
    return found
