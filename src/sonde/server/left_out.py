# SPDX-License-Identifier: Apache-2.0
"""What an answer lacks, as its headers have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

FILES: Final = "X-Sonde-Files-Left-Out"
"""Header of an answer: how many files it lacks because they are damaged."""
ROWS: Final = "X-Sonde-Rows-Left-Out"
"""Header of an answer: how many rows, series or intervals it has no room for."""


class LeftOut(NamedTuple):
    """What an answer lacks."""

    files: int
    rows: int

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> LeftOut:
        """By the headers of a response, with names in lower case."""
        texts = (headers.get(name.lower(), "") for name in (FILES, ROWS))
        return cls(*(int(it) if it.isascii() and it.isdigit() else 0 for it in texts))

    def lines(self, what: str) -> list[str]:
        """Sentences, where something is left out; `what`: what was asked for, a plural."""
        rows = f"{self.rows:,} rows of {what} are beyond what an answer has room for"
        files = f"{self.files:,} damaged files are left out"
        return [line for line, count in ((rows, self.rows), (files, self.files)) if count]
