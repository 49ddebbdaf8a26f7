# SPDX-License-Identifier: Apache-2.0
"""The frame of a stack that shows most of what a thread did there."""

from __future__ import annotations

from sonde.model.code import Frame, Stacks

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
