# SPDX-License-Identifier: Apache-2.0
"""Sessions and reports without proofs: who may add, once, and by which word of the helper."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from sonde.fleet import hpke, unproved
from sonde.fleet.evaluation.local_deployment import START_S, small_task
from sonde.fleet.roster import Identity
from sonde.fleet.session import SESSION_S, Session, Sessions
from sonde.fleet.wire import Malformed

BUCKETS = 16


class Pair:
    """Both parties, and nodes with a session at both."""

    def __init__(self, nodes=3):
        self.keys = [hpke.generate_key_pair() for _ in range(2)]
        self.task = replace(
            small_task(BUCKETS, kind="plain"),
            leader_key=self.keys[0][1],
            helper_key=self.keys[1][1],
        )
        roles = hpke.LEADER, hpke.HELPER
        self.leader, self.helper = (
            unproved.Party(self.task, Sessions(self.task, role, private), START_S)
            for role, (private, _) in zip(roles, self.keys, strict=True)
        )
        self.nodes = [Identity() for _ in range(nodes)]
        self.sessions = [Session.open(self.task, node, START_S) for node in self.nodes]
        for session in self.sessions:
            assert self.admit(session.hello) == ["", ""]

    def admit(self, hello, now_s=START_S):
        enrolled = {node.public for node in self.nodes}
        parties = self.leader, self.helper
        return [p.sessions.admit(hello, enrolled.__contains__, now_s) for p in parties]

    def record(self, node, bucket, time_s=START_S):
        id_ = os.urandom(16)
        ((_, leader, helper),) = self.task.aggregation().shard([id_], [[bucket]], 1)
        return unproved.make_record(self.task, self.sessions[node], id_, time_s, leader, helper)

    def add(self, *records):
        """(sums, reports counted, refusals)."""
        theirs = []

        def ask(body):
            added, verdict = unproved.add_as_helper(self.helper, body)
            theirs.append(added)
            return verdict

        body = unproved.bundle(self.task, records)
        ours = unproved.add_as_leader(self.leader, body, ask)
        assert ours.accepted == theirs[0].accepted
        sums = self.task.aggregation().unshard([ours.aggregate, theirs[0].aggregate])
        return sums, len(ours.accepted), dict(ours.refused)


def test_shares_of_a_bundle_add_up():
    sums, count, refused = (pair := Pair()).add(*(pair.record(n, n % 2) for n in range(3)))
    assert (sums[:3], count, refused) == ([2, 1, 0], 3, {})


def test_a_node_counts_once_a_period_whatever_is_sent_again():
    pair = Pair()
    record = pair.record(0, 5)
    assert pair.add(record, record)[1:] == (1, {"quota": 1})
    assert pair.add(record, pair.record(0, 6))[1:] == (0, {"quota": 2})


@pytest.mark.parametrize("at", [20, 41, -1], ids=["id", "leader's share", "helper's share"])
def test_what_was_touched_on_the_way_counts_for_neither(at):
    pair = Pair()
    record = bytearray(pair.record(0, 5))
    record[at] ^= 1
    sums, count, refused = pair.add(bytes(record), pair.record(1, 5))
    assert (sums[5], count, sum(refused.values())) == (1, 1, 1)
    assert pair.add(pair.record(0, 5))[1] == 1  # and does not use up the node's place


def test_a_report_of_another_time_or_session_is_refused():
    pair = Pair()
    late = pair.record(0, 1, START_S - 1)
    stranger = os.urandom(16) + pair.record(1, 1)[16:]
    others = pair.sessions[1].id + pair.record(2, 1)[16:]
    _, count, refused = pair.add(late, stranger, others)
    assert (count, refused) == (0, {"late": 1, "unknown session": 1, "forged": 1})


def test_a_leader_cannot_move_a_share_to_another_report():
    pair = Pair()
    one, two = pair.record(0, 1), pair.record(1, 2)
    asked = one[:40] + two[-48:]
    added, verdict = unproved.add_as_helper(pair.helper, asked)
    assert (added.accepted, verdict) == ([], b"\x00")


def test_a_session_opens_only_for_the_enrolled_node_that_signed_it():
    pair = Pair()
    node = pair.nodes[0]
    hello = Session.open(pair.task, node, START_S).hello
    assert pair.admit(hello[:-1] + bytes([hello[-1] ^ 1])) == ["forged"] * 2
    assert pair.admit(hello[:-3]) == ["malformed"] * 2
    assert pair.admit(hello, START_S + SESSION_S + 1) == ["late"] * 2
    assert pair.admit(Session.open(pair.task, Identity(), START_S).hello) == ["unknown node"] * 2
    other = replace(pair.task, name="other")
    assert pair.admit(Session.open(other, node, START_S).hello) == ["unknown task"] * 2
    assert pair.admit(hello) == pair.admit(hello) == ["", ""]


def test_enrolment_is_visible_only_to_the_holder_of_the_key():
    pair = Pair()
    for node in (pair.nodes[0], Identity()):
        hello = Session.open(pair.task, node, START_S).hello
        assert pair.admit(hello[:-1] + bytes([hello[-1] ^ 1])) == ["forged"] * 2


def test_a_recorded_hello_pushes_no_newer_session_out():
    pair = Pair()
    opened = [Session.open(pair.task, pair.nodes[0], START_S + n) for n in (1, 2, 3)]
    for session in opened:
        assert pair.admit(session.hello, START_S + 3) == ["", ""]
    assert pair.admit(opened[0].hello, START_S + 4) == ["replayed"] * 2
    assert all(session.id in pair.leader.sessions.keyring for session in opened[1:])


def test_a_bundle_whose_question_was_lost_may_come_again():
    pair = Pair()
    body = unproved.bundle(pair.task, [pair.record(0, 3)])

    def lost(_):
        raise ConnectionError

    with pytest.raises(ConnectionError):
        unproved.add_as_leader(pair.leader, body, lost)
    with pytest.raises(Malformed, match="does not fit"):
        unproved.add_as_leader(pair.leader, body, lambda asked: b"")
    added = unproved.add_as_leader(
        pair.leader, body, lambda asked: unproved.add_as_helper(pair.helper, asked)[1]
    )
    assert len(added.accepted) == 1


def test_threads_that_share_a_party_count_a_report_once():
    pair = Pair()
    body = unproved.bundle(pair.task, [pair.record(n, 7) for n in range(3)])

    def add(_):
        theirs = []

        def ask(asked):
            added, verdict = unproved.add_as_helper(pair.helper, asked)
            theirs.append(added)
            return verdict

        return unproved.add_as_leader(pair.leader, body, ask), theirs[0]

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(add, range(50)))
    aggregation = pair.task.aggregation()
    shares = [aggregation.merge([d[party].aggregate for d in done]) for party in (0, 1)]
    assert aggregation.unshard(shares)[7] == 3
    assert sum(len(ours.accepted) for ours, _ in done) == 3


def test_a_session_is_not_opened_ahead_of_its_time_to_live_longer():
    pair = Pair()
    hello = Session.open(pair.task, pair.nodes[0], START_S + 3600).hello
    assert pair.admit(hello) == ["late"] * 2
    assert pair.admit(hello, START_S + 3600) == [""] * 2


def test_a_node_cannot_fill_the_memory_of_a_party_with_sessions():
    pair = Pair()
    before = len(pair.leader.sessions.keyring)
    opened = [Session.open(pair.task, pair.nodes[0], START_S) for _ in range(20)]
    for session in opened:
        assert pair.admit(session.hello) == ["", ""]
    for party in (pair.leader, pair.helper):
        assert len(party.sessions.keyring) == before + 1
        assert opened[-1].id in party.sessions.keyring
    pair.sessions[0] = opened[-1]
    assert pair.add(pair.record(0, 3), pair.record(1, 3))[0][3] == 2


def test_a_bundle_of_another_shape_is_no_bundle():
    pair = Pair()
    with pytest.raises(Malformed):
        pair.add(pair.record(0, 1)[:-1])
