# SPDX-License-Identifier: Apache-2.0
"""The sign in front of a line that says whether something is as it should be."""

from __future__ import annotations

from typing import Final

MARKS: Final = {"pass": "✓", "warn": "!", "fail": "✗", "n/a": "·"}
_COLOURS: Final = {"pass": "\033[32m", "warn": "\033[33m", "fail": "\033[31m", "n/a": "\033[2m"}
_RESET: Final = "\033[0m"


def mark(status: str, *, colour: bool) -> str:
    """The sign of a status: one character, in its colour where the terminal shows colours."""
    return f"{_COLOURS[status]}{MARKS[status]}{_RESET}" if colour else MARKS[status]
