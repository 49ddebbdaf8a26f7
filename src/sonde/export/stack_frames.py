# SPDX-License-Identifier: Apache-2.0
"""Stacks as flame graphs show them: frames from the root on, and a label on top of the leaf."""

from __future__ import annotations

from collections.abc import Iterator

from sonde.errors import CaptureTooLarge
from sonde.model.code import NO_STACK, Frame, Stacks
from sonde.model.profile import Profile, ProfileKind, ProfileRow

MOST_FRAMES = 100_000_000
"""In all rows of a profile together. An hour on a large machine has some ten million."""


def check_size(profile: Profile) -> None:
    """Raise CaptureTooLarge where a profile written stack by stack would be far too large.

    A hostile capture can refer to one deep stack from any number of rows.
    """
    stacks = profile.stacks
    depth = [stacks.offsets[row + 1] - stacks.offsets[row] for row in set(profile.row_stack)]
    if len(profile) * max(depth, default=0) <= MOST_FRAMES:
        return
    offsets = stacks.offsets
    if sum(offsets[row + 1] - offsets[row] for row in profile.row_stack) > MOST_FRAMES:
        raise CaptureTooLarge(
            f"the stacks of this capture have more than {MOST_FRAMES:,} frames in all",
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


def root_first(stacks: Stacks, stack: int) -> Iterator[int]:
    """Indices of a stack's frames, outermost first, as a flame graph shows them.

    Only the binary of frames without a symbol is known, so a run of them in one binary is one
    frame. Empty where no stack was recorded.
    """
    nameless = ""
    for index in reversed(stacks.indices(stack)):
        frame = stacks.frames[index]
        if frame.function:
            nameless = ""
        elif frame.name == nameless:
            continue
        else:
            nameless = frame.name
        yield index


def frames_root_first(stacks: Stacks, stack: int) -> Iterator[Frame]:
    """The frames of `root_first`; `NO_STACK` alone where no stack was recorded."""
    shown = False
    for index in root_first(stacks, stack):
        shown = True
        yield stacks.frames[index]
    if not shown:
        yield NO_STACK
