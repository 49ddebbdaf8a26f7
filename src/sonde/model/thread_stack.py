# SPDX-License-Identifier: Apache-2.0
"""Where a thread of a running process is now."""

from __future__ import annotations

from dataclasses import dataclass

from sonde.model.code import Frame


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """One thread and its whole stack."""

    tid: int
    name: str
    state: str
    """As in ps(1): R running, S and D asleep, T stopped, t traced, Z zombie."""
    frames: tuple[Frame, ...]
    """Leaf first, kernel frames before user frames; native and Python ones together."""
    is_whole: bool
    """It reaches the thread's entry."""
    end: str
    """Why it does not; '' where it does."""


@dataclass(frozen=True, slots=True)
class ProcessStacks:
    """The threads of a process, and what is missing."""

    threads: list[ThreadStack]
    threads_left_out: int
    """Threads that there was no room or no time for."""
    names_left_out: int
    """Frames without a name, or a line of Python, as there was no time to look it up."""
