# SPDX-License-Identifier: Apache-2.0
"""The status sign at the beginning of a line."""

from __future__ import annotations

from typing import Final

MARKS: Final = {"pass": "✓", "warn": "!", "fail": "✗", "n/a": "·"}
_COLOURS: Final = {"pass": "\033[32m", "warn": "\033[33m", "fail": "\033[31m", "n/a": "\033[2m"}
_RESET: Final = "\033[0m"


def mark(status: str, *, colour: bool) -> str:
    """The sign of a status: one character, coloured on terminals that support it."""
    return f"{_COLOURS[status]}{MARKS[status]}{_RESET}" if colour else MARKS[status]
