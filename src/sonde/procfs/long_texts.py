# SPDX-License-Identifier: Apache-2.0
"""Cuts texts that other programs choose, by the memory that they take here.

CPython keeps each character of a text in as many bytes as its widest one needs: one beyond the
Basic Multilingual Plane makes a text of ASCII four times as large. A name is cut in its middle, as
both ends are needed to know it; a path from the left, as its end is the file.
"""

from __future__ import annotations

from typing import Final

NAME_BYTES: Final = 1_024
"""Of the characters of a name, as they are in memory."""
PATH_BYTES: Final = 512
"""Of those of a path: names of source files with their folders have some fifty characters."""
_MARK: Final = "…"
_MARK_WIDTH: Final = 2


def short_name(text: str, most_bytes: int = NAME_BYTES) -> str:
    """A name that takes no more memory, with a mark in place of its middle where it was longer."""
    most = _most(text, most_bytes)
    if len(text) <= most:
        return text
    most = _most_cut(text, most_bytes)
    tail = most // 3
    return text[: most - tail] + _MARK + text[len(text) - tail :]


def short_end(path: str, most_bytes: int = PATH_BYTES) -> str:
    """The end of a path that takes no more memory, with a mark before it where it was longer."""
    if len(path) <= _most(path, most_bytes):
        return path
    return _MARK + path[len(path) - _most_cut(path, most_bytes) :]


def _most(text: str, most_bytes: int) -> int:
    """How many characters like the text's fit into `most_bytes`."""
    return most_bytes if text.isascii() else most_bytes // _width(text)


def _most_cut(text: str, most_bytes: int) -> int:
    """The same beside a mark."""
    return most_bytes // max(_MARK_WIDTH, _width(text)) - 1


def _width(text: str) -> int:
    """Bytes of each character (PEP 393)."""
    widest = max(text, default="")
    return 1 if widest <= "\xff" else 2 if widest <= "\uffff" else 4
