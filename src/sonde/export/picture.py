# SPDX-License-Identifier: Apache-2.0
"""Stacks as pictures show them: what a stack stands on, and what it ends in."""

from __future__ import annotations

from collections.abc import Iterator

from sonde.errors import CaptureTooLarge
from sonde.model.code import NO_STACK, Frame, Stacks
from sonde.model.profile import Profile, ProfileKind, ProfileRow

MOST_FRAMES = 100_000_000
"""In all stacks of a profile together, each as often as it comes. Those of an hour on a large
machine have some ten million."""


def check_amount(profile: Profile) -> None:
    """Raise CaptureTooLarge where a profile written stack by stack would have no end.

    One deep stack, which costs the capture little, may be that of any number of rows.
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


def tip(profile: Profile, row: ProfileRow) -> str:
    """What a picture puts on top of the stack: the reason of a wait, the call, or the kernel.

    '' where the stack says it already: on a CPU, or where the call itself is the leaf.
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
    """Indices of a stack's frames from the thread's entry on, as a picture shows them.

    Frames without a symbol tell only their binary, so a run of them in one binary is one frame.
    Empty where no stack was taken.
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
    """The frames that `root_first` gives; `NO_STACK` alone where none was taken."""
    shown = False
    for index in root_first(stacks, stack):
        shown = True
        yield stacks.frames[index]
    if not shown:
        yield NO_STACK
