# SPDX-License-Identifier: Apache-2.0
"""The proofs: official vectors hold, honest sums are exact, whatever is bent is refused."""

import json
import os
from pathlib import Path

import pytest

from sonde._fleet import Aggregation
from sonde.fleet.task import chunk_length

VECTORS = Path(__file__).parents[1] / "data" / "vdaf"


def load(name):
    vector = json.loads((VECTORS / f"{name}.json").read_text())
    kind = {"Histogram": "histogram", "SumVec": "sumvec", "L1BoundSum": "l1boundsum"}[
        name.removeprefix("Prio3").split("_")[0]
    ]
    most = vector.get("max_measurement", vector.get("max_value", 1))
    context = bytes.fromhex(vector["ctx"])
    made = Aggregation(kind, vector["length"], most, vector["chunk_length"], context)
    return vector, made


def parts(vector, name):
    return [bytes.fromhex(report[name]) for report in vector["reports"]]


def input_shares(vector, party):
    return [bytes.fromhex(report["input_shares"][party]) for report in vector["reports"]]


@pytest.mark.parametrize(
    "name", ["Prio3Histogram_0", "Prio3Histogram_2", "Prio3SumVec_0", "Prio3L1BoundSum_0"]
)
def test_official_vectors_hold(name):
    vector, aggregation = load(name)
    key = bytes.fromhex(vector["verify_key"])
    nonces, publics = parts(vector, "nonce"), parts(vector, "public_share")
    pending = aggregation.begin(key, nonces, publics, input_shares(vector, 0), 2)
    assert [m.hex() for m in pending.messages] == [
        report["verifier_shares"][0][0] for report in vector["reports"]
    ]
    replies, faults, helper = aggregation.check(
        key, nonces, publics, input_shares(vector, 1), pending.messages, 2
    )
    assert faults == [None] * len(nonces)
    assert [r.hex() for r in replies] == [r["verifier_messages"][0] for r in vector["reports"]]
    faults, leader = pending.finish(replies, 2)
    assert faults == [None] * len(nonces)
    assert [leader.hex(), helper.hex()] == vector["agg_shares"]
    assert aggregation.unshard([leader, helper]) == vector["agg_result"]


@pytest.mark.parametrize("bad", ["bad_helper_jr_blind", "bad_leader_jr_blind", "bad_public_share"])
def test_official_bad_vectors_are_refused_by_both_parties(bad):
    vector, aggregation = load(f"Prio3Histogram_{bad}")
    key = bytes.fromhex(vector["verify_key"])
    nonces, publics = parts(vector, "nonce"), parts(vector, "public_share")
    pending = aggregation.begin(key, nonces, publics, input_shares(vector, 0), 1)
    message = bytes.fromhex(vector["reports"][0]["verifier_shares"][0][0])
    replies, faults, helper = aggregation.check(
        key, nonces, publics, input_shares(vector, 1), [message], 1
    )
    assert faults == ["forged"]
    assert replies == [None]
    assert helper == aggregation.zero()
    refused, leader = pending.finish([None], 1)
    assert refused[0] is not None
    assert leader == aggregation.zero()


def test_official_bad_verifier_message_is_refused():
    vector, aggregation = load("Prio3Histogram_bad_verifier_message")
    key = bytes.fromhex(vector["verify_key"])
    pending = aggregation.begin(
        key, parts(vector, "nonce"), parts(vector, "public_share"), input_shares(vector, 0), 1
    )
    message = bytes.fromhex(vector["reports"][0]["verifier_messages"][0])
    faults, leader = pending.finish([message], 1)
    assert faults[0] is not None
    assert leader == aggregation.zero()


def run(aggregation, samples, bend=lambda party, shares: shares):
    """(sum or None, faults) of a batch, whose shares `bend` may change."""
    key, nonces = os.urandom(32), [os.urandom(16) for _ in samples]
    publics, leaders, helpers = map(list, zip(*aggregation.shard(nonces, samples, 2), strict=True))
    publics = bend("public", publics)
    pending = aggregation.begin(key, nonces, publics, bend("leader", leaders), 2)
    messages = [m or b"" for m in pending.messages]
    replies, faults, theirs = aggregation.check(
        key, nonces, publics, bend("helper", helpers), messages, 2
    )
    ours_faults, ours = pending.finish(replies, 2)
    return aggregation.unshard([ours, theirs]), faults, ours_faults


@pytest.mark.parametrize(
    ("kind", "most"), [("histogram", 1), ("l1boundsum", 3), ("sumvec", 3), ("plain", 3)]
)
def test_sums_of_honest_reports_are_exact(kind, most):
    aggregation = Aggregation(kind, 20, most, chunk_length(20), b"task")
    samples = [[i % 20] * most for i in range(50)]
    total, faults, ours = run(aggregation, samples)
    assert faults == ours == [None] * 50
    assert total == [most * sum(s[0] == b for s in samples) for b in range(20)]


@pytest.mark.parametrize("party", ["public", "leader", "helper"])
@pytest.mark.parametrize("at", [0, -1])
def test_a_bent_part_is_refused_by_both_and_costs_no_other_report(party, at):
    aggregation = Aggregation("histogram", 20, 1, 4, b"task")

    def bend(which, shares):
        if which != party:
            return shares
        bent = bytearray(shares[1])
        bent[at] ^= 1
        return [shares[0], bytes(bent), *shares[2:]]

    total, faults, ours = run(aggregation, [[0], [1], [2]], bend)
    assert total == [1, 0, 1] + [0] * 17
    assert [fault is None for fault in faults] == [True, False, True]
    assert [fault is None for fault in ours] == [True, False, True]


@pytest.mark.parametrize("size", [0, 3, 10_000])
def test_shares_of_the_wrong_size_are_malformed(size):
    aggregation = Aggregation("histogram", 20, 1, 4, b"task")
    pending = aggregation.begin(os.urandom(32), [os.urandom(16)], [bytes(64)], [bytes(size)], 1)
    assert pending.messages == [None]
    assert pending.faults == ["malformed"]


@pytest.mark.parametrize("short", ["publics", "shares", "messages"])
@pytest.mark.parametrize("kind", ["histogram", "plain"])
def test_lists_of_different_lengths_drop_no_report(kind, short):
    aggregation = Aggregation(kind, 20, 1, 4, b"task")
    key, nonces = os.urandom(32), [os.urandom(16), os.urandom(16)]
    publics, leaders, helpers = zip(*aggregation.shard(nonces, [[1], [2]], 1), strict=True)
    messages = aggregation.begin(key, nonces, list(publics), list(leaders), 1).messages
    given = {"publics": list(publics), "shares": list(helpers), "messages": messages}
    given[short] = given[short][:1]

    with pytest.raises(ValueError, match="differ in length"):
        aggregation.check(key, nonces, *given.values(), 1)
    if short != "messages":
        given["shares"] = list(leaders)[: len(given["shares"])]
        with pytest.raises(ValueError, match="differ in length"):
            aggregation.begin(key, nonces, given["publics"], given["shares"], 1)


def test_an_l1_bound_holds():
    aggregation = Aggregation("l1boundsum", 20, 3, 4, b"task")
    with pytest.raises(ValueError, match="value"):
        aggregation.shard([os.urandom(16)], [[0, 1, 2, 3]], 1)


def test_a_report_made_for_another_task_is_refused():
    theirs, ours = (Aggregation("histogram", 20, 1, 4, name) for name in (b"theirs", b"ours"))
    nonce, key = os.urandom(16), os.urandom(32)
    public, leader, helper = theirs.shard([nonce], [[3]], 1)[0]
    pending = ours.begin(key, [nonce], [public], [leader], 1)
    _, faults, _ = ours.check(key, [nonce], [public], [helper], [pending.messages[0] or b""], 1)
    assert faults[0] is not None


def test_noise_may_make_counts_negative():
    for kind in ("histogram", "plain"):
        aggregation = Aggregation(kind, 3, 1, 1, b"task")
        noised = aggregation.add_noise(aggregation.zero(), [-5, 0, 7])
        assert aggregation.unshard([noised, aggregation.zero()]) == [-5, 0, 7]


@pytest.mark.parametrize(
    ("claim", "fault"),
    [
        ([1, 0, 0], None),
        ([2, 0, 0], "forged"),
        ([1, 1, 0], "forged"),
        ([0, 0, 0], "forged"),
        ([2**127, 0, 0], "forged"),
        ([0, 0, 1], None),
    ],
)
def test_only_one_whole_sample_can_be_proved(claim, fault):
    aggregation = Aggregation("histogram", 3, 1, chunk_length(3), b"task")
    for _ in range(20):
        nonce, key = os.urandom(16), os.urandom(32)
        public, leader, helper = Aggregation.shard_dishonestly(
            3, chunk_length(3), b"task", nonce, claim
        )
        pending = aggregation.begin(key, [nonce], [public], [leader], 1)
        replies, faults, _ = aggregation.check(
            key, [nonce], [public], [helper], [pending.messages[0]], 1
        )
        assert faults == [fault]
        assert pending.finish(replies, 1)[0][0] == (fault and "refused by the helper")
