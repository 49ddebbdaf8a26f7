# SPDX-License-Identifier: Apache-2.0
"""Waits for the network: a slow or lossy path, or a service that answers late.

Looks like: threads wait in sockets for the end of a connection that the program made itself. With
segments sent again, or with a queue of the network in the way, it is the path; else the other side.
What to do: look at the path (drops, limits) or at that service.
"""

from __future__ import annotations

from collections import defaultdict

from sonde.diagnose.case import Case
from sonde.diagnose.incident import Candidate, FaultCause
from sonde.diagnose.lost_time import Part

LEAST = 0.08
LEAST_SENT_AGAIN = 2.0
"""Segments a second more."""
LEAST_ROUND_S = 0.05
"""Longer than a receiver delays its acknowledgement (Linux: 40 ms)."""


def path(case: Case) -> Candidate | None:
    """Segments get lost, or queue."""
    lost = _lost(case)
    again = _sent_again(case)
    was, now = _rounds(case)
    queued = now - was > LEAST_ROUND_S
    if lost < LEAST or not (again >= LEAST_SENT_AGAIN or queued):
        return None
    evidence = [f"waited {lost:.2f} s more of each second for the network"]
    if again >= LEAST_SENT_AGAIN:
        evidence.append(f"{again:.0f} segments a second more were sent again")
    if queued:
        evidence.append(f"a round trip took {now * 1e3:.1f} ms, before {was * 1e3:.1f}")
    share = _share(case)
    step = "Look for drops and limits on the way: ip -s link, tc -s qdisc."
    return Candidate(FaultCause.SLOW_NETWORK, share, tuple(evidence), next_step=step)


def dependency(case: Case) -> Candidate | None:
    """Somebody whom it asked answers late."""
    lost = _lost(case)
    if lost < LEAST or not case.last.peers:
        return None
    asked = _segments(case)
    busy = {peer: count for peer, count in asked.items() if peer in case.last.peers}
    peers = sorted(busy or case.last.peers, key=lambda peer: -busy.get(peer, 0.0))
    evidence = [
        f"waited {lost:.2f} s more of each second in sockets",
        f"it made connections to {', '.join(peers[:3])}",
    ]
    against = []
    if _sent_again(case) < LEAST_SENT_AGAIN:
        evidence.append("nothing was sent again")
    else:
        against.append("segments were sent again")
    share = _share(case) * (1.0 if not against else 0.5)
    step = f"Look at the service at {peers[0]}."
    return Candidate(
        FaultCause.REMOTE_DEPENDENCY, share, tuple(evidence), tuple(against), None, step
    )


def _lost(case: Case) -> float:
    idle = 0.0 if case.lost.asks_nobody else case.lost.parts.get(Part.NETWORK, 0.0)
    return idle + case.lost.parts.get(Part.ASKED, 0.0)


def _share(case: Case) -> float:
    return _lost(case) / max(case.lost.whole, 1e-9)


def _sent_again(case: Case) -> float:
    """Segments a second more, by all processes of this node: the other end may be here, too."""
    return sum(max(0.0, case.grew("retransmits", pid)) for pid in case.after)


def _segments(case: Case) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for moment in (*case.window.before, *case.window.after):
        one = moment.processes.get(case.victim)
        for flow in one.flows if one is not None else ():
            found[flow.peer] += flow.segments
    return found


def _rounds(case: Case) -> tuple[float, float]:
    """The longest smoothed round trip to a peer that it asked, before and after, s."""
    found = []
    for moments in (case.window.before, case.window.after):
        longest = 0.0
        for moment in moments:
            one = moment.processes.get(case.victim)
            for flow in one.flows if one is not None else ():
                if flow.peer in case.last.peers or not case.last.peers:
                    longest = max(longest, flow.round_trip_ns / 1e9)
        found.append(longest)
    return found[0], found[1]
