# SPDX-License-Identifier: Apache-2.0
"""Whose code each thread runs (the program's, the driver's, Sonde's), by its stacks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa

from sonde.model.interner import Interner
from sonde.model.timeline import ThreadOwner
from sonde.query.columns import Frames, ThreadTracks

_OWNERS = tuple(ThreadOwner)


def set_owners(naming: Interner, tracks: ThreadTracks, frames: Frames, sample: pa.Table) -> None:
    """Sets `Track.owner` of each thread in `naming` of which all stacks that show an owner show the
    same."""
    owner = frames.roles.owner[frames.row_of(sample.column("stack_id"))]
    # One number for each pair: a capture may have millions of rows.
    base = len(_OWNERS) + 1
    found: dict[int, set[ThreadOwner]] = {}
    for pair in np.unique(tracks.of_rows(sample).astype(np.int64) * base + owner).tolist():
        track, number = divmod(pair, base)
        if number:
            found.setdefault(track, set()).add(_OWNERS[number - 1])
    for track, owners in found.items():
        if len(owners) == 1:
            naming.tracks[track] = replace(naming.tracks[track], owner=owners.pop())
