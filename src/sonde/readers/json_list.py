# SPDX-License-Identifier: Apache-2.0
"""Reads the values of a long JSON list piece by piece, in time linear in the length of the text.

If a value ends beyond the piece, its end is searched first and the value is decoded once: decoding
again with each piece would take quadratic time. Values that are too large or no JSON are yielded as
`NOT_READ`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Final

PIECE: Final = 1 << 20
"""Characters read at once."""
NOT_READ: Final = "not read"
"""In place of a value that was not decoded."""
END: Final = object()
"""In place of a value, at the end of the list."""

_SPACE = re.compile(r"[\s,]*+")
_PLAIN = re.compile(r"[^\"\[\]{}]*+")
_OPENING = re.compile(r"[\[{]++")
_CLOSING = re.compile(r"[\]}]++")
_IN_STRING = re.compile(r"(?:[^\"\\]++|\\.)*+", re.DOTALL)
_GARBAGE = re.compile(r"[^,\[\]{}\"]*+")


def values_of_list(
    read: Callable[[int], str], piece: str, at: int, tail: list[str], most: int
) -> Iterator[object]:
    """Yields every value from `at` (behind the opening bracket) on, and END at the closing bracket.

    `most`: the largest length of a value in characters. Longer values, and text that is no JSON,
    are yielded as NOT_READ. Text that was read behind the list is appended to `tail`.
    """
    decode = json.JSONDecoder().raw_decode
    while True:
        space = _SPACE.match(piece, at)
        at = space.end() if space else at
        if at >= len(piece):
            piece, at = read(PIECE), 0
            if not piece:
                return
            continue
        if piece[at] == "]":
            tail.append(piece[at:])
            yield END
            return
        try:
            value, end = decode(piece, at)
            if end == len(piece) and piece[-1] not in ']}"':
                raise ValueError("a number that may continue in the next piece")
        except (ValueError, RecursionError):
            scanner = _Scanner(read, piece, at, most)
            text = scanner.value()
            if text is None:
                return
            piece, at = scanner.piece, scanner.at
            try:
                yield decode(text)[0] if text else NOT_READ
            except (ValueError, RecursionError):
                yield NOT_READ
            continue
        at = end
        yield value


class _Scanner:
    """Finds where a value ends, across pieces, without decoding it."""

    def __init__(self, read: Callable[[int], str], piece: str, at: int, most: int) -> None:
        self.piece, self.at = piece, at
        self._read = read
        self._most = most
        self._kept: list[str] = []
        self._size = 0
        self._from = at

    def value(self) -> str | None:
        """The text of the value, '' if it is too long; None where the file ends within it."""
        if self.piece[self.at] not in '[{"':
            return self._garbage()
        depth = 0
        in_string = False
        while True:
            if self.at >= len(self.piece):
                if not self._more():
                    return None
                continue
            if in_string:
                self.at = _end(_IN_STRING, self.piece, self.at)
                if self.at == len(self.piece) - 1 and self.piece[-1] == "\\":
                    if not self._more():
                        return None
                    continue
                if self.at < len(self.piece):
                    self.at += 1
                    in_string = False
            elif self.piece[self.at] == '"':
                self.at += 1
                in_string = True
                continue
            elif self.piece[self.at] in "[{":
                end = _end(_OPENING, self.piece, self.at)
                depth += end - self.at
                self.at = end
                continue
            elif self.piece[self.at] in "]}":
                end = _end(_CLOSING, self.piece, self.at)
                closed = min(depth, end - self.at)
                depth -= closed
                self.at += closed
            else:
                self.at = _end(_PLAIN, self.piece, self.at)
                continue
            if not depth and not in_string:
                return self._text()

    def _garbage(self) -> str | None:
        """Skips text that begins no value, up to where another value may begin."""
        while True:
            self.at = _end(_GARBAGE, self.piece, self.at)
            if self.at < len(self.piece):
                if self.piece[self.at] == "}":  # closes nothing
                    self.at += 1
                return self._text()
            if not self._more():
                return None

    def _more(self) -> bool:
        """Reads the next piece, at the same position; False at the end of the file."""
        rest = self.piece[self.at :]  # a lone backslash, or nothing
        self._keep(self.piece[self._from : self.at])
        more = self._read(PIECE)
        self.piece, self.at, self._from = rest + more, 0, 0
        return bool(more)

    def _keep(self, text: str) -> None:
        self._size += len(text)
        if self._size <= self._most:
            self._kept.append(text)
        else:
            self._kept.clear()

    def _text(self) -> str:
        self._keep(self.piece[self._from : self.at])
        return "".join(self._kept) if self._size <= self._most else ""


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at
