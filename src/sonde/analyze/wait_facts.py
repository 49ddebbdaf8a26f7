# SPDX-License-Identifier: Apache-2.0
"""How long the waits of a cause are, where a record has them one by one, and what their length
alone suggests."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sonde.analyze.thread_time import cause_of
from sonde.model.causes import Cause
from sonde.model.single_waits import SingleWaitKey
from sonde.model.timeline import Timeline, Total, TotalKind, WaitDetail
from sonde.model.wait_lengths import lengths_of, lengths_text

OF_CAUSE = 0.8
"""Waits that only thread and reason distinguish count for a cause that has this share of
their time, or more."""
ACKNOWLEDGED_NS = (39_000_000, 52_000_000)
"""Waits of this length may be for a delayed acknowledgement: Linux delays one by 40 ms at least,
and by up to a tick of its timer more (10 ms at 100 Hz)."""
ACKNOWLEDGED_SPREAD_NS = 6_000_000
"""From the 10th to the 90th percentile of these, at most: a timer ends them, all after the same
time. What a program takes to answer varies more."""
ACKNOWLEDGED = 0.25
"""Part of the waits that are known one by one, by number, that are of that length, at least."""
LEAST_ACKNOWLEDGED = 10
"""Such waits, at least: one a second in the default recording."""
MOSTLY_TCP = 0.5
"""Of the waits in poll, by the looks that found the other end, that were on TCP connections."""
_MOVES: Final = ("socket", "read", "write")
"""Reasons for which a thread waits within a call that reads or writes a socket."""
_TCP_ADDRESS: Final = re.compile(r"[^/@]+:\d{1,5}")
_HINT: Final = (
    "as regular as a delayed acknowledgement of TCP (40 ms): possibly one side sends a message in"
    " several small writes; set TCP_NODELAY there, or send each message with one write"
)


@dataclass(slots=True)
class _Waits:
    """Waits of one cause for one reason."""

    ns: int = 0
    count: int = 0
    keys: set[SingleWaitKey] = field(default_factory=set)


def wait_facts(timeline: Timeline, totals: Iterable[Total]) -> Mapping[Cause, Sequence[str]]:
    """By cause, in words: how long the waits for the reason with the most time are. `totals`: those
    of some threads."""
    by_cause: dict[Cause, dict[str, _Waits]] = defaultdict(lambda: defaultdict(_Waits))
    parts: dict[SingleWaitKey, dict[Cause, int]] = defaultdict(lambda: defaultdict(int))
    for one in totals:
        if one.kind != TotalKind.BLOCKED:
            continue
        cause = cause_of(timeline, one)
        is_idle = one.serves or one.wait_detail == WaitDetail.IDLE
        key = SingleWaitKey(one.track, one.name, is_idle)
        parts[key][cause] += one.ns
        waits = by_cause[cause][one.name]
        waits.ns += one.ns
        waits.count += one.count
        waits.keys.add(key)
    found: dict[Cause, list[str]] = {}
    for cause, by_reason in by_cause.items():
        reason, waits = max(by_reason.items(), key=lambda item: item[1].ns)
        keys = [key for key in waits.keys if key in timeline.single_waits]
        if all(parts[it][cause] >= OF_CAUSE * sum(parts[it].values()) for it in keys):
            found[cause] = _facts(timeline, reason, waits, keys)
    return found


def _facts(
    timeline: Timeline, reason: str, waits: _Waits, keys: Sequence[SingleWaitKey]
) -> list[str]:
    """What is known of waits for a reason; `keys`: of those that are known one by one."""
    lengths = [ns for key in keys for ns in timeline.single_waits[key].tolist()]
    single = lengths_of(lengths)
    # How many waits are for something else is not known, so what is beyond the single ones has no
    # mean.
    count = waits.count if _are_all(timeline, reason, waits) else single.count
    text = lengths_text(count, waits.ns, single) if lengths else ""
    if not text:
        return []
    low, high = ACKNOWLEDGED_NS
    alike = lengths_of(ns for ns in lengths if low <= ns < high)
    is_regular = (
        alike.count >= max(LEAST_ACKNOWLEDGED, ACKNOWLEDGED * len(lengths))
        and alike.p90_ns - alike.p10_ns <= ACKNOWLEDGED_SPREAD_NS
    )
    facts = [f"{reason}: {text}"]
    if is_regular and _are_of_tcp(timeline, reason, keys):
        facts.append(_alike(alike.count, len(lengths)))
    return facts


def _are_all(timeline: Timeline, reason: str, waits: _Waits) -> bool:
    """Whether these are all waits of their threads for the reason, not a part of them by stacks."""
    tracks = {key.track for key in waits.keys}
    every = (
        one.ns
        for one in timeline.totals
        if one.kind == TotalKind.BLOCKED and one.name == reason and one.track in tracks
    )
    return sum(every) <= waits.ns


def _alike(count: int, of: int) -> str:
    which = "these are" if count == of else f"{count:,} of these are"
    return f"{which} {_HINT}"


def _are_of_tcp(timeline: Timeline, reason: str, keys: Sequence[SingleWaitKey]) -> bool:
    """Whether waits are mostly for a TCP connection: within a call that reads or writes it, by the
    kernel's functions; in poll, by the other ends that looks found."""
    if reason in _MOVES:
        return any(key in timeline.tcp_waits for key in keys)
    if reason != "poll":
        return False
    peers = [peer for key in keys for peer in timeline.peers.get(key.track, ())]
    looks = sum(peer.looks for peer in peers)
    of_tcp = sum(peer.looks for peer in peers if _TCP_ADDRESS.fullmatch(peer.address))
    return looks > 0 and of_tcp >= MOSTLY_TCP * looks
