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
SLOWER_ROUND = 1.5
LEAST_ROUND_S = 0.002


def path(case: Case) -> Candidate | None:
    """Segments get lost, or queue."""
    lost = case.lost.parts.get(Part.NETWORK, 0.0)
    again = case.grew("retransmits", case.victim)
    was, now = _rounds(case)
    queued = now > max(LEAST_ROUND_S, SLOWER_ROUND * was) and bool(was)
    if lost < LEAST or not (again >= LEAST_SENT_AGAIN or queued):
        return None
    evidence = [f"waited {lost:.2f} s more of each second for the network"]
    if again >= LEAST_SENT_AGAIN:
        evidence.append(f"{again:.0f} segments a second more were sent again")
    if queued:
        evidence.append(f"a round trip took {now * 1e3:.1f} ms, before {was * 1e3:.1f}")
    share = case.lost.share(Part.NETWORK)
    step = "Look for drops and limits on the way: ip -s link, tc -s qdisc."
    return Candidate(FaultCause.SLOW_NETWORK, share, tuple(evidence), next_step=step)


def dependency(case: Case) -> Candidate | None:
    """Somebody whom it asked answers late."""
    lost = case.lost.parts.get(Part.NETWORK, 0.0)
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
    if case.grew("retransmits", case.victim) < LEAST_SENT_AGAIN:
        evidence.append("nothing was sent again")
    else:
        against.append("segments were sent again")
    share = case.lost.share(Part.NETWORK) * (1.0 if not against else 0.5)
    step = f"Look at the service at {peers[0]}."
    return Candidate(
        FaultCause.REMOTE_DEPENDENCY, share, tuple(evidence), tuple(against), None, step
    )


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
