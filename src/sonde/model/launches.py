# SPDX-License-Identifier: Apache-2.0
"""What a process launched on its devices in a second or so, by some of its launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class CountedLaunch(NamedTuple):
    """One launch of several of its kind."""

    start_ns: int
    """When its device began with it, CLOCK_MONOTONIC."""
    weight: float
    """How many launches it stands for, itself included."""
    what: str
    """The name of a kernel; else REPLAY, COPY or SET."""


REPLAY = "(replay of a graph)"
COPY = "(copy)"
SET = "(set)"


@dataclass(frozen=True, slots=True)
class LaunchRates:
    """How often a process launches."""

    launches: float
    """Kernels, copies and sets a second, without those of replays; 0 where none was seen."""
    replays: float
    """Replays of graphs a second."""
    counted: tuple[CountedLaunch, ...] = ()
    """What that was counted by, in the order of `start_ns`."""
    captures: bool = False
    """Graphs were captured meanwhile: launches are not counted then, so the rates are too low."""
