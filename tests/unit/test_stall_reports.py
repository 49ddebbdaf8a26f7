# SPDX-License-Identifier: Apache-2.0
"""Incidents of single ranks beside the stall of their job."""

from __future__ import annotations

import pytest

from sonde.agent import stall_reports
from sonde.agent.stall_reports import HOLD_S, MAX_HELD, SHOWN, StallReports
from sonde.diagnose.incident import (
    Candidate,
    Change,
    FaultCause,
    Incident,
    RankReport,
    Verdict,
)
from sonde.diagnose.moments import Window

S = 1_000_000_000
SINCE_NS = 100 * S
MISSING = 11
RANKS = (10, MISSING, 12)
WINDOW = Window(10, 1, [], [], {}, [], [], [])


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stall_reports.time, "monotonic", lambda: now[0])
    return now


class Node:
    def __init__(self):
        self.found = []
        self.reports = StallReports(lambda incident, window: self.found.append(incident))

    def pauses(self, since_ns=SINCE_NS, now_ns=SINCE_NS + S):
        self.reports.update(now_ns, [(RANKS, since_ns)] if since_ns else [])

    def offer(self, victim, cause=FaultCause.LOCK, began_ns=SINCE_NS, change=None):
        candidates = (Candidate(cause, 1.0, (f"evidence of {victim}",)),)
        verdict = Verdict(candidates, 2.0, {}, change)
        self.reports.offer(incident(victim, verdict, began_ns), WINDOW)

    def stalls(self, change=None, ranks=RANKS):
        its = tuple(
            RankReport(number, pid, pid == MISSING, "waits", "") for number, pid in enumerate(ranks)
        )
        candidates = (Candidate(FaultCause.STALLED_JOB, 1.0, ("rank 1 is missing",)),)
        verdict = Verdict(candidates, 1.0, {}, change, "", its)
        self.reports.stalled(incident(MISSING, verdict), WINDOW)

    @property
    def victims(self):
        return [one.victim for one in self.found]


def incident(victim, verdict, began_ns=SINCE_NS):
    return Incident(victim, "python", "", began_ns, began_ns + S, began_ns + 2 * S, (), verdict)


@pytest.fixture
def node(clock):
    return Node()


def test_incidents_of_waiting_ranks_become_evidence_of_the_stall(node):
    node.pauses()
    node.offer(10)
    node.offer(12, FaultCause.REMOTE_DEPENDENCY)
    node.offer(MISSING, FaultCause.UNKNOWN)
    node.reports.release()
    assert node.found == []
    node.stalls()
    assert node.victims == [MISSING, MISSING]
    stall, own = node.found
    assert own.verdict.cause == FaultCause.UNKNOWN
    assert stall.verdict.candidates[0].evidence == (
        "rank 1 is missing",
        "rank 0 (10) is slower by this wait: lock: evidence of 10",
        "rank 2 (12) is slower by this wait: remote-dependency: evidence of 12",
    )
    assert node.reports.unreported == 0


def test_later_ones_are_counted_and_the_missing_rank_keeps_its_incidents(node):
    node.pauses()
    node.stalls()
    node.offer(10)
    node.offer(MISSING)
    assert node.victims == [MISSING, MISSING]
    assert node.reports.unreported == 1
    # It goes on; what is explained late began in the stall.
    node.pauses(0, SINCE_NS + 20 * S)
    node.offer(12, began_ns=SINCE_NS + 10 * S)
    assert node.reports.unreported == 2
    node.offer(12, began_ns=SINCE_NS + 25 * S)
    assert node.victims[-1] == 12
    node.pauses(0, SINCE_NS + 100 * S)
    node.offer(10)
    assert node.victims[-1] == 10


@pytest.mark.parametrize(
    "other",
    [
        {"victim": 99},
        {"victim": 10, "cause": FaultCause.FROZEN},
        {"victim": 10, "cause": FaultCause.CPU_CONTENTION},
        {"victim": 10, "began_ns": SINCE_NS - 5 * S},
        {"victim": 10, "change": Change.LOAD},
    ],
)
def test_what_is_another_matter_is_reported_at_once(node, other):
    node.pauses()
    node.offer(**other)
    node.stalls()
    node.offer(**other)
    assert node.victims == [other["victim"], MISSING, other["victim"]]


def test_a_pause_that_is_no_stall_gives_them_back(node):
    node.pauses()
    node.offer(10)
    node.pauses(0)
    node.reports.release()
    assert node.victims == [10]


def test_nothing_is_kept_back_for_long_or_without_a_bound(node, clock):
    node.pauses()
    for _ in range(MAX_HELD + 3):
        node.offer(10)
    assert len(node.found) == 3
    clock[0] += HOLD_S
    node.reports.release()
    assert len(node.found) == MAX_HELD + 3
    node.offer(12)
    node.reports.close()
    assert node.victims[-1] == 12


def test_after_the_end_nothing_is_kept_back(node):
    node.pauses()
    node.reports.close()
    node.offer(10)
    assert node.victims == [10]


def test_where_one_rank_works_alone_the_others_wait_is_no_incident(node):
    node.pauses()
    node.offer(10)
    node.stalls(Change.OWN_WORK)
    node.offer(12)
    assert node.victims == [MISSING]
    assert node.reports.unreported == 2


def test_of_many_the_first_ones_are_listed(node):
    ranks = tuple(range(10, 20))
    node.reports.update(SINCE_NS, [(ranks, SINCE_NS)])
    for pid in ranks:
        node.offer(pid)
    node.stalls(ranks=ranks)
    (stall, own) = node.found
    assert own.victim == MISSING
    assert len(stall.verdict.candidates[0].evidence) == 1 + SHOWN + 1
    assert stall.verdict.candidates[0].evidence[-1] == "5 more waiting ranks are slower"
