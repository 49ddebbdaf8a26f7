# SPDX-License-Identifier: Apache-2.0
"""Bounds the texts of the frames in one chunk: functions and file names of profiled code may be
as long and as many as its author likes, and a server refuses a chunk that is too large, with all
users' rows in it.

Each party (`procfs.party_of`) has an equal part; what one leaves over goes to the others. A party
that needs more has its longest texts cut, all to one length, so that short names stay whole.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Final

from sonde.limits import common_length, cut
from sonde.model.code import KnownFrame

MOST_BYTES: Final = 2 << 20
"""Of the texts of all frames in a chunk (UTF-8). Of 67 recordings, of PyTorch and JAX programs
among them, the one with most has 0.23 MB in all its chunks."""
LEAST_BYTES: Final = 16
"""A text is never cut to less."""


def shortened(
    stacks: Iterable[tuple[int, tuple[KnownFrame, ...]]], most: int = MOST_BYTES
) -> dict[KnownFrame, KnownFrame]:
    """What replaces frames whose texts are too long, with the same ids; `stacks`: party and frames
    of each. A frame of several parties counts for the first."""
    of_party: defaultdict[int, dict[int, KnownFrame]] = defaultdict(dict)
    seen: set[int] = set()
    for party, frames in stacks:
        its = of_party[party]
        for known in frames:
            if known.id not in seen:
                seen.add(known.id)
                its[known.id] = known
    texts = {party: _sizes(its.values()) for party, its in of_party.items()}
    needs = {
        party: sum(size * count for size, count in sizes.items()) for party, sizes in texts.items()
    }
    part = common_length(needs.values(), most)
    found: dict[KnownFrame, KnownFrame] = {}
    for party, its in of_party.items():
        if needs[party] <= part:
            continue
        length = max(LEAST_BYTES, common_length(texts[party].elements(), part))
        for known in its.values():
            frame = known.frame
            short = frame._replace(
                function=cut(frame.function, length),
                binary=cut(frame.binary, length),
                file=cut(frame.file, length),
            )
            if short != frame:
                found[known] = KnownFrame(known.id, short)
    return found


def _sizes(frames: Iterable[KnownFrame]) -> Counter[int]:
    """How many texts have each length in bytes."""
    return Counter(
        len(text.encode("utf-8", "replace"))
        for known in frames
        for text in (known.frame.function, known.frame.binary, known.frame.file)
    )
