# SPDX-License-Identifier: Apache-2.0
"""Whose code each thread runs (the program's, the driver's, Sonde's), by its stacks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.interner import Interner
from sonde.model.timeline import ThreadOwner
from sonde.query.columns import Frames, ThreadTracks, int64_column

MOST_OF_SONDE: Final = 0.2
"""Of the recorded time, on CPUs, for the thread of Sonde's library in a program."""
_OWNERS = tuple(ThreadOwner)


def set_owners(
    naming: Interner, tracks: ThreadTracks, frames: Frames, sample: pa.Table, window_ns: int
) -> None:
    """Sets `Track.owner` of each thread in `naming` of which all stacks that show an owner show the
    same. `window_ns`: the length of the record."""
    owner = frames.roles.owner[frames.row_of(sample.column("stack_id"))]
    # One number for each pair: a capture may have millions of rows.
    base = len(_OWNERS) + 1
    found: dict[int, set[ThreadOwner]] = {}
    for pair in np.unique(tracks.of_rows(sample).astype(np.int64) * base + owner).tolist():
        track, number = divmod(pair, base)
        if number:
            found.setdefault(track, set()).add(_OWNERS[number - 1])
    single = {track: next(iter(owners)) for track, owners in found.items() if len(owners) == 1}
    ours = _of_sonde(naming, tracks, sample, single, window_ns)
    for track, one in single.items():
        if one != ThreadOwner.SONDE or track in ours:
            naming.tracks[track] = replace(naming.tracks[track], owner=one)


def _of_sonde(
    naming: Interner,
    tracks: ThreadTracks,
    sample: pa.Table,
    owners: dict[int, ThreadOwner],
    window_ns: int,
) -> set[int]:
    """The threads that are Sonde's, of those whose code has its name, which any program may take to
    be left out of verdicts: the one of a process, which is not its first and hardly runs."""
    claims: dict[int, list[int]] = defaultdict(list)
    for track, owner in owners.items():
        if owner == ThreadOwner.SONDE:
            claims[naming.tracks[track].pid].append(track)
    if not claims:
        return set()
    ran = np.zeros(len(naming.tracks), np.float64)
    rows = sample.filter(pc.equal(sample.column("kind"), "cpu"))
    np.add.at(ran, tracks.of_rows(rows), int64_column(rows, "weight_ns"))
    return {
        mine[0]
        for pid, mine in claims.items()
        if len(mine) == 1
        and naming.tracks[mine[0]].number != pid
        and ran[mine[0]] <= MOST_OF_SONDE * window_ns
    }
