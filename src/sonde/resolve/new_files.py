# SPDX-License-Identifier: Apache-2.0
"""Which of the newly mapped files are opened in advance: those of each party in turn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, zip_longest
from typing import Final

from sonde.resolve.binary import FileKey
from sonde.resolve.tracked_process import TrackedProcess

MAX_LOOKED_THROUGH: Final = 1024
"""The newest: to find out whose a process is takes time, too."""

NewFile = tuple[TrackedProcess, FileKey]


def in_turn(files: Sequence[NewFile], most: int) -> list[NewFile]:
    """The newest of `files`, which are in the order in which they were mapped: one of each party at
    a time, `most` of them at the most."""
    if len(files) <= most:
        return list(reversed(files))
    by_party: dict[int, list[NewFile]] = {}
    for process, file in reversed(files[-MAX_LOOKED_THROUGH:]):
        by_party.setdefault(process.party, []).append((process, file))
    turns = zip_longest(*by_party.values())
    return list(islice((it for turn in turns for it in turn if it is not None), most))
