# SPDX-License-Identifier: Apache-2.0
"""Whom threads waited for in sockets: rows of `activity` of kind peer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from sonde.model.peers import Peer
from sonde.query.columns import ThreadTracks, int64_column, texts_of

MAX_PEERS = 16
"""Of one thread, that are kept: those found most often."""
_MOST_LOOKS = 1 << 20


def peers_of(tracks: ThreadTracks, activity: pa.Table) -> dict[int, Sequence[Peer]]:
    """By track: the other ends, the one that was found most often first.

    A connection of which one look found the process, and another one did not, is that process's.
    """
    rows = activity.filter(pc.equal(activity.column("kind").cast(pa.string()), "peer"))
    looks: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    holders: dict[str, tuple[int, str]] = {}
    columns = (tracks.of_rows(rows).tolist(), texts_of(rows, "name"), texts_of(rows, "op"))
    numbers = (int64_column(rows, name).tolist() for name in ("waker_pid", "count"))
    if not rows.num_rows:
        return {}
    for track, address, name, pid, count in zip(*columns, *numbers, strict=True):
        key = address or f"{pid} {name}"  # pairs have no address
        looks[track][key] += min(max(count, 0), _MOST_LOOKS)
        if pid or key not in holders:
            holders[key] = pid, name
    found: dict[int, Sequence[Peer]] = {}
    for track, by_key in looks.items():
        ranked = sorted(by_key, key=lambda key: -by_key[key])[:MAX_PEERS]
        found[track] = [
            Peer("" if key == f"{pid} {name}" else key, pid, name, by_key[key])
            for key in ranked
            for pid, name in [holders[key]]
        ]
    return found
