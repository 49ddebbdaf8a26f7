# SPDX-License-Identifier: Apache-2.0
"""Stacks as pictures show them: what a stack stands on, and what it ends in."""

from __future__ import annotations

from collections.abc import Iterator

from sonde.model.code import Frame
from sonde.model.profile import Profile, ProfileRow


def tip(profile: Profile, row: ProfileRow) -> str:
    """What a picture puts on top of the stack: the reason of a wait, or the device call.

    '' where the stack says it already: on a CPU, or where the call itself is the leaf.
    """
    if not row.name:
        return ""
    if profile.kind == "device":
        frames = profile.stacks.indices(row.stack)
        leaf = profile.stacks.frames[frames[0]].function if frames else ""
        return "" if leaf == row.name else row.name
    return f"({row.name})"


def root_first(profile: Profile, row: ProfileRow) -> Iterator[Frame]:
    """The frames of a row from the thread's entry on, without its tip."""
    return reversed(profile.stacks[row.stack])
