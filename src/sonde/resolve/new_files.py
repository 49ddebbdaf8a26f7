# SPDX-License-Identifier: Apache-2.0
"""Which of the newly mapped files are opened in advance: those of each party in turn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, zip_longest
from typing import Final

from sonde.resolve.binary import FileKey
from sonde.resolve.tracked_process import TrackedProcess

MAX_LOOKED_THROUGH: Final = 1024
"""The newest files; older ones are not opened in advance, as it takes time to find the party of a
process, too."""

NewFile = tuple[TrackedProcess, FileKey]


def in_turn(files: Sequence[NewFile], limit: int) -> list[NewFile]:
    """At most `limit` of `files`, which are in the order in which they were mapped: of each party
    in turn its newest one."""
    if len(files) <= limit:
        return list(reversed(files))
    by_party: dict[int, list[NewFile]] = {}
    for process, file in reversed(files[-MAX_LOOKED_THROUGH:]):
        by_party.setdefault(process.party, []).append((process, file))
    rounds = zip_longest(*by_party.values())
    return list(islice((it for each in rounds for it in each if it is not None), limit))
