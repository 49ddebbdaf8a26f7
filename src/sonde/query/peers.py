# SPDX-License-Identifier: Apache-2.0
"""Whom threads waited for in sockets: rows of `activity`, kinds peer, peer-candidate, client."""

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
_PEER = "peer"
_KINDS = pa.array([_PEER, "peer-candidate"])


def peers_of(tracks: ThreadTracks, activity: pa.Table) -> dict[int, Sequence[Peer]]:
    """By track: the other ends, the one that was found most often first.

    A connection of which one look found the process, and another one did not, is that process's.
    Looks of one process count for it alone: another network namespace has the same addresses.
    """
    rows = activity.filter(pc.is_in(activity.column("kind").cast(pa.string()), _KINDS))
    looks: dict[int, dict[tuple[str, bool], int]] = defaultdict(lambda: defaultdict(int))
    holders: dict[tuple[int, str], tuple[int, str]] = {}
    texts = (texts_of(rows, name) for name in ("kind", "name", "op"))
    numbers = (int64_column(rows, name).tolist() for name in ("pid", "waker_pid", "count"))
    if not rows.num_rows:
        return {}
    columns = zip(tracks.of_rows(rows).tolist(), *texts, *numbers, strict=True)
    asking: dict[int, int] = {}
    for track, kind, address, name, asks, pid, count in columns:
        key = address or f"{pid} {name}"  # pairs have no address
        looks[track][key, kind == _PEER] += min(max(count, 0), _MOST_LOOKS)
        asking[track] = asks
        if pid or (asks, key) not in holders:
            holders[asks, key] = pid, name
    found: dict[int, Sequence[Peer]] = {}
    for track, by_key in looks.items():
        ranked = sorted(by_key, key=lambda key: -by_key[key])[:MAX_PEERS]
        found[track] = [
            Peer("" if key == f"{pid} {name}" else key, pid, name, by_key[key, alone], alone)
            for key, alone in ranked
            for pid, name in [holders[asking[track], key]]
        ]
    return found


def clients_of(tracks: ThreadTracks, activity: pa.Table) -> dict[int, int]:
    """By track: how often its thread was found waiting for what others, who had connected to it,
    ask next."""
    rows = activity.filter(pc.equal(activity.column("kind").cast(pa.string()), "client"))
    found: dict[int, int] = defaultdict(int)
    counts = int64_column(rows, "count").tolist()
    for track, count in zip(tracks.of_rows(rows).tolist(), counts, strict=True):
        found[track] += min(max(count, 0), _MOST_LOOKS)
    return dict(found)
