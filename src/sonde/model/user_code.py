# SPDX-License-Identifier: Apache-2.0
"""Which frames of a stack are the user's own code.

Python code of the program comes first. A program that is itself an installed package has none, so
there the code of packages counts, and where there is none, the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable

from sonde.model.code import Frame
from sonde.model.libraries import CodeKind, kind_of_file, kind_of_native

RANKS = (3, 2, 1)
"""Ranks of Python frames: the program, a package, the standard library."""


def rank_of(frame: Frame) -> int:
    """One of `RANKS`; 0 for what is not Python."""
    if frame.kind != "python":
        return 0
    kind = kind_of_file(frame.file, frame.function, frame.origin)
    if kind == CodeKind.OWN_PYTHON:
        return RANKS[0]
    return RANKS[2] if kind in (CodeKind.NEUTRAL, CodeKind.QUEUE) else RANKS[1]


def innermost_user_frame(frames: Iterable[Frame]) -> Frame | None:
    """The innermost frame of the highest rank of a stack, leaf first; None without Python."""
    ranked = [(rank_of(frame), frame) for frame in frames]
    best = max((rank for rank, _ in ranked), default=0)
    return next((frame for rank, frame in ranked if rank == best), None) if best else None


def is_binary_of_sonde(binary: str) -> bool:
    """Whether a file of machine code is the library that Sonde has in a process."""
    return kind_of_native(binary, "") == CodeKind.SONDE


def function_of(place: str) -> str:
    """A place without its line number; a name of machine code may hold colons and has no line."""
    function, _, line = place.rpartition(":")
    return function if function and line.isdecimal() else place
