# SPDX-License-Identifier: Apache-2.0
"""Stacks as pictures show them: what a stack stands on, and what it ends in."""

from __future__ import annotations

from collections.abc import Iterator

from sonde.model.code import NO_STACK, Frame, Stacks
from sonde.model.profile import KERNEL, Profile, ProfileRow


def tip(profile: Profile, row: ProfileRow) -> str:
    """What a picture puts on top of the stack: the reason of a wait, the call, or the kernel.

    '' where the stack says it already: on a CPU, or where the call itself is the leaf.
    """
    if not row.name:
        return ""
    if profile.kind == KERNEL:
        return row.name
    if profile.kind == "device":
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
