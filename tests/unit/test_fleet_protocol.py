# SPDX-License-Identifier: Apache-2.0
"""Both parties on disk: nothing lost, nothing counted twice, every refusal named and counted."""

import asyncio
import os
import sqlite3
import ssl
from dataclasses import replace
from pathlib import Path

import pytest

from sonde.errors import SinkError, UsageError
from sonde.fleet.aggregator import HelperUnavailable, Refused
from sonde.fleet.evaluation.local_deployment import HOUR_S, START_S, LocalDeployment, small_task
from sonde.fleet.evaluation.simulated_nodes import overstated_report
from sonde.fleet.node import UploadConnection, sign, upload_with_retry
from sonde.fleet.roster import Identity, Roster
from sonde.fleet.service import Service
from sonde.fleet.wire import (
    Item,
    Malformed,
    Reply,
    Report,
    decode_job,
    decode_replies,
    encode_job,
    encode_replies,
)


@pytest.fixture
def fleet(tmp_path):
    made = LocalDeployment(tmp_path, small_task(), ["a", "a", "b", "b", "b", "c"])
    yield made
    made.close()


def test_a_release_is_the_sum_with_its_error_bar_and_its_guarantee(fleet):
    assert fleet.send(*(fleet.report(n, [n % 3]) for n in range(6))) == [""] * 6
    assert fleet.exact_sums()[:4] == [2, 2, 2, 0]
    fleet.close_batch()
    release = fleet.collect()
    assert release.rows[0].error == pytest.approx(4.113, abs=0.01)
    assert abs(release.rows[0].count - 2) < 40
    assert release.privacy_guarantee() == "ε = 1 per gpu, no ε per tenant (δ = 1e-06)"


def test_only_noised_shares_remain_after_a_release(fleet):
    fleet.send(fleet.report(0, [1]), fleet.report(1, [1]))
    fleet.close_batch()
    fleet.collect()
    assert fleet.exact_sums() == [0] * 16


@pytest.mark.parametrize(
    "reason",
    ["malformed", "forged", "unknown node", "unknown task", "early", "late", "replayed", "quota"],
)
def test_refusals_carry_a_reason_and_a_count(fleet, reason):
    good, stranger = fleet.report(0, [1]), Identity()
    bad = {
        "malformed": good.encode()[:-1],
        "forged": replace(good, signature=bytes(64)),
        "unknown node": sign(stranger, replace(good, node=stranger.public)),
        "unknown task": replace(good, task=bytes(32)),
        "early": replace(good, time_s=good.time_s + 2 * HOUR_S),
        "late": replace(good, time_s=good.time_s - 3 * HOUR_S),
        "replayed": good,
        "quota": fleet.report(0, [2]),
    }[reason]
    if reason in ("replayed", "quota"):
        assert fleet.send(good) == [""]
    assert fleet.send(bad, bad) == [reason, reason]
    assert fleet.leader.store.refusals() == {reason: 2}


def test_a_lie_about_size_is_caught_by_the_proof(fleet):
    lie = overstated_report(fleet.task, fleet.nodes[1], fleet.report(1, [0]))
    assert fleet.send(fleet.report(0, [4]), lie) == ["", ""]
    assert sum(fleet.exact_sums()) == 1
    assert fleet.leader.store.refusals() == {"forged": 1}
    assert fleet.helper.store.refusals() == {"forged": 1}
    assert fleet.leader.store.counts() == fleet.helper.store.counts() == {START_S: 1}


@pytest.mark.parametrize("part", ["leader", "helper"])
def test_a_report_that_one_party_cannot_open_counts_for_neither(fleet, part):
    whole = fleet.report(0, [4])
    bent = replace(whole, **{part: getattr(whole, part)[:-1]})
    bent = replace(bent, signature=fleet.nodes[0].sign(bent.signed()))
    fleet.send(bent, fleet.report(1, [4]))
    assert fleet.exact_sums()[4] == 1
    assert fleet.leader.store.batch(START_S).checksum == fleet.helper.store.batch(START_S).checksum


def item_of(report):
    """What a lying leader could send of a report: with a digest of zeroes, and no message."""
    return Item(
        report.id,
        report.time_s,
        report.node,
        bytes(32),
        report.public,
        report.helper,
        report.signature,
        b"",
    )


def test_the_helper_does_not_take_the_leaders_word_for_a_report(fleet):
    report = fleet.report(0, [1])
    item = item_of(report)
    reply = decode_replies(fleet.helper.process_job(encode_job(bytes(16), [item])), 1)
    assert reply == [Reply(None, "forged")]
    assert fleet.helper.store.counts() == {}


def test_a_job_with_the_same_report_twice_is_refused(fleet):
    report = fleet.report(0, [1])
    item = item_of(report)
    with pytest.raises(Refused, match="distinct reports"):
        fleet.helper.process_job(encode_job(bytes(16), [item, item]))


def test_the_helper_refuses_replays_in_another_job(fleet):
    report = fleet.report(0, [1])
    fleet.send(report)
    item = item_of(report)
    assert decode_replies(fleet.helper.process_job(encode_job(b"j" * 16, [item])), 1) == [
        Reply(None, "replayed")
    ]


@pytest.mark.parametrize("lost", ["request", "answer"])
@pytest.mark.parametrize("restart", [False, True])
def test_a_job_that_broke_off_is_done_once(tmp_path, lost, restart):
    broken = [True]

    def wrap(post):
        def flaky(path, body):
            if broken and lost == "request":
                raise HelperUnavailable
            answer = post(path, body)
            if broken:
                raise HelperUnavailable
            return answer

        return flaky

    fleet = LocalDeployment(tmp_path, small_task(), ["a"] * 4, wrap)
    with pytest.raises(HelperUnavailable):
        fleet.send(*(fleet.report(n, [n]) for n in range(4)))
    broken.clear()
    if restart:
        fleet.close()
        fleet.open()
    while fleet.leader.process_job():
        pass
    assert fleet.exact_sums()[:5] == [1, 1, 1, 1, 0]
    assert fleet.leader.store.counts() == fleet.helper.store.counts() == {START_S: 4}
    fleet.close()


def test_the_two_parties_must_have_counted_the_same(fleet):
    fleet.send(*(fleet.report(n, [n]) for n in range(3)))
    with fleet.leader.store._database.transaction() as db:
        db.execute("UPDATE batch SET count = count + 1")
    fleet.close_batch()
    with pytest.raises(Refused, match="different reports"):
        fleet.collect()
    assert fleet.helper.store.ledger() == []


def test_a_spent_budget_is_refused_by_each_party(tmp_path):
    fleet = LocalDeployment(tmp_path, small_task(budget=2.0), ["a"] * 2)
    for _ in range(2):
        start_s = fleet.task.batch_of(int(fleet.now_s))
        fleet.send(fleet.report(0, [1]), fleet.report(1, [1]))
        fleet.now_s = start_s + HOUR_S + 700
        fleet.collect(start_s)
    start_s = fleet.task.batch_of(int(fleet.now_s))
    fleet.send(fleet.report(0, [1]), fleet.report(1, [1]))
    fleet.now_s = start_s + HOUR_S + 700
    for party in (fleet.leader, fleet.helper):
        with pytest.raises(Refused) as refused:
            party._publish(start_s, party.store.batch(start_s))
        assert refused.value.reason == "budget spent"
    fleet.close()


def test_only_the_cap_of_a_tenants_nodes_counts(tmp_path):
    fleet = LocalDeployment(tmp_path, small_task(tenant_cap=2), ["big"] * 5 + ["small"])
    reasons = fleet.send(*(fleet.report(n, [1]) for n in range(6)))
    assert sorted(reasons) == [""] * 3 + ["tenant cap"] * 3
    assert reasons[5] == ""
    assert fleet.exact_sums()[1] == 3
    fleet.close()


def test_the_cap_holds_for_what_a_batch_has_taken_whatever_the_roster_has_later(tmp_path):
    fleet = LocalDeployment(tmp_path, small_task(tenant_cap=1), ["big"] * 2)
    reasons = fleet.send(*(fleet.report(n, [1]) for n in range(2)))
    assert sorted(reasons) == ["", "tenant cap"]
    other = reasons.index("tenant cap")
    fleet.close()
    fleet.roster = Roster({fleet.nodes[other].public: "big"})  # the first has left since
    fleet.open()
    assert fleet.send(fleet.report(other, [1])) == ["tenant cap"]
    assert fleet.exact_sums()[1] == 1
    assert fleet.helper.store.check_claims(
        [(b"i" * 16, fleet.nodes[other].public, int(fleet.now_s))]
    ) == ["tenant cap"]
    fleet.close()


def test_only_the_holder_of_a_nodes_key_learns_anything_of_the_node(tmp_path):
    fleet = LocalDeployment(tmp_path, small_task(tenant_cap=1), ["big"] * 5)
    good = fleet.report(0, [1])
    names = [node.public for node in fleet.nodes] + [Identity().public]
    guesses = [replace(good, node=name, signature=bytes(64)) for name in names]
    assert fleet.send(*guesses) == ["forged"] * 6
    fleet.close()


def test_a_partys_files_are_its_own_and_bodies_go_when_they_are_verified(tmp_path):
    fleet = LocalDeployment(tmp_path, small_task(), ["a"] * 2)
    fleet.send(fleet.report(0, [1]))
    for path in tmp_path.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    fleet.close()
    fleet.open()  # what was left of the files of bodies goes at the latest here
    assert list(tmp_path.rglob("*.reports")) == []
    fleet.close()


def test_counts_of_refusals_outlive_a_restart(tmp_path):
    fleet = LocalDeployment(tmp_path, small_task(), ["a"] * 2)
    assert fleet.send(b"nonsense", fleet.report(0, [1]), b"nonsense") == [
        "malformed",
        "",
        "malformed",
    ]
    fleet.send(b"more")
    fleet.close()
    fleet.open()
    assert fleet.leader.store.refusals() == {"malformed": 3}
    fleet.close()


def test_several_samples_in_one_report(tmp_path):
    fleet = LocalDeployment(tmp_path, small_task(kind="l1boundsum", max_samples=7), ["a"] * 2)
    fleet.send(fleet.report(0, [1, 1, 2]), fleet.report(1, [2] * 7))
    assert fleet.exact_sums()[:4] == [0, 2, 8, 0]
    assert fleet.task.sensitivity("gpu") == 7
    fleet.close()


def test_a_late_report_does_not_touch_a_released_batch(fleet):
    late = fleet.report(5, [1])
    fleet.send(fleet.report(0, [1]), fleet.report(1, [1]))
    fleet.close_batch()
    before = fleet.collect().rows
    assert fleet.send(late) == ["late"]
    assert fleet.collect().rows == before


def test_messages_survive_their_encoding_and_nothing_else_does(fleet):
    report = fleet.report(0, [1])
    assert Report.decode(report.encode()) == report
    for cut in (report.encode()[:-1], report.encode() + b"x", b"", report.encode()[:100]):
        with pytest.raises(Malformed):
            Report.decode(cut)
    with pytest.raises(Malformed):
        decode_job(bytes(17))
    replies = [Reply(b"yes"), Reply(None, "forged")]
    assert decode_replies(encode_replies(replies), len(replies)) == replies


def test_samples_that_fit_no_report_are_refused_at_the_node(fleet):
    for samples in ([99], [], [1, 2]):
        with pytest.raises(UsageError):
            fleet.report(0, samples)


def test_tasks_refuse_nonsense():
    with pytest.raises(UsageError, match="one sample"):
        replace(small_task(), max_samples=3)
    with pytest.raises(UsageError, match="whole periods"):
        replace(small_task(), period_s=7)
    with pytest.raises(UsageError, match="no such aggregation"):
        replace(small_task(), kind="median")


def test_a_job_that_the_helper_refuses_whole_does_not_stand_in_the_way(tmp_path):
    refusing = [True]

    def wrap(post):
        def strict(path, body):
            if refusing:
                raise Refused("malformed")
            return post(path, body)

        return strict

    fleet = LocalDeployment(tmp_path, small_task(), ["a"] * 4, wrap)
    fleet.send(fleet.report(0, [1]))
    refusing.clear()
    fleet.send(fleet.report(1, [1]))
    assert fleet.exact_sums()[1] == 1
    assert fleet.leader.store.refusals() == {"malformed": 1}
    fleet.close()


@pytest.mark.parametrize("reason", ["too slow", "hung up", "busy", "unknown task", "slow down"])
def test_a_job_is_kept_unless_its_content_is_refused(tmp_path, reason):
    refusing = [True]

    def wrap(post):
        def delayed(path, body):
            if refusing:
                raise Refused(reason)
            return post(path, body)

        return delayed

    fleet = LocalDeployment(tmp_path, small_task(), ["a"] * 4, wrap)
    with pytest.raises(HelperUnavailable, match=reason):
        fleet.send(*(fleet.report(n, [1]) for n in range(4)))
    assert fleet.leader.store.waiting == 4
    refusing.clear()
    while fleet.leader.process_job():
        pass
    assert fleet.exact_sums()[1] == 4
    assert fleet.leader.store.refusals() == {}
    fleet.close()


def test_reports_that_are_lost_with_a_refused_job_are_logged_as_an_error(tmp_path, caplog):
    def wrap(post):
        def strict(path, body):
            raise Refused("malformed", "no\x1b[2J job")

        return strict

    fleet = LocalDeployment(tmp_path, small_task(), ["a"] * 3, wrap)
    fleet.send(*(fleet.report(n, [1]) for n in range(3)))
    (record,) = (one for one in caplog.records if one.levelname == "ERROR")
    expected = r"3 reports are lost, their job is refused: malformed ('no\x1b[2J job')"
    assert record.getMessage() == expected
    fleet.close()


def test_bodies_in_memory_go_with_their_job_however_soon_it_is_taken(fleet):
    store = fleet.leader.store
    drop = store._spool.drop

    def at_once(segments):  # a driver is here before the admission has returned
        drop(segments)
        while fleet.leader.process_job():
            pass

    store._spool.drop = at_once
    assert fleet.leader.admit([fleet.report(n, [1]).encode() for n in range(3)]) == [""] * 3
    assert (store.waiting, store._cached) == (0, {})
    assert fleet.exact_sums()[1] == 3


def test_a_step_that_the_disk_refuses_leaves_nothing_behind(fleet):
    store = fleet.leader.store
    broken = sqlite3.OperationalError("database or disk is full")
    claim = store._register

    def once(db, *report):
        if db.execute("SELECT count(*) FROM refusal").fetchone()[0]:  # not where it only looks
            raise broken
        return claim(db, *report)

    store._register = once
    body = fleet.report(0, [1]).encode()
    assert fleet.leader.admit([b"nonsense"]) == ["malformed"]
    store.check_claims = lambda claims: [""] * len(claims)
    with pytest.raises(sqlite3.OperationalError):
        fleet.leader.admit([body])
    assert (store.waiting, sum(store._spool._held.values())) == (0, 0)
    store._register = claim
    assert fleet.send(body) == [""]
    assert fleet.exact_sums()[1] == 1


@pytest.mark.parametrize("harm", ["zeroed", "gone"])
def test_bodies_that_the_disk_lost_are_counted_and_block_nothing(fleet, tmp_path, harm):
    assert fleet.leader.admit([fleet.report(n, [1]).encode() for n in range(2)]) == ["", ""]
    fleet.close()
    (segment,) = tmp_path.rglob("*.reports")
    if harm == "gone":
        segment.unlink()
    else:
        half = segment.stat().st_size // 2
        segment.write_bytes(bytes(half) + segment.read_bytes()[half:])
    fleet.open()
    fleet.send(fleet.report(2, [1]))
    lost = 2 if harm == "gone" else 1
    assert fleet.exact_sums()[1] == 3 - lost
    assert fleet.leader.store.refusals() == {"lost on disk": lost}
    assert fleet.leader.store.waiting == 0


def test_lost_bodies_still_wait_after_a_step_that_was_rolled_back(fleet, tmp_path, monkeypatch):
    assert fleet.leader.admit([fleet.report(n, [1]).encode() for n in range(2)]) == ["", ""]
    fleet.close()
    (segment,) = tmp_path.rglob("*.reports")
    segment.unlink()
    fleet.open()
    store, counted = fleet.leader.store, []

    def fill_up(_, reasons):  # when one of the two is removed
        counted.append(reasons)
        if len(counted) == 2:
            raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as full, pytest.raises(sqlite3.OperationalError):
        full.setattr("sonde.fleet.store.count_refusals", fill_up)
        store.next_job(b"j" * 16, 10)
    assert store.waiting == 2
    store.next_job(b"j" * 16, 10)
    assert store.waiting == 0


def test_what_a_helper_calls_its_refusals_fills_no_table(tmp_path):
    def wrap(post):
        def talkative(path, body):
            reasons = [Reply(None, f"because of {n}") for n in range(3)]
            return encode_replies(reasons)

        return talkative

    fleet = LocalDeployment(tmp_path, small_task(), ["a"] * 3, wrap)
    fleet.send(*(fleet.report(n, [1]) for n in range(3)))
    assert fleet.leader.store.refusals() == {"refused by the helper": 3}
    fleet.close()


def test_one_process_holds_a_partys_state(fleet):
    for party in (fleet.leader, fleet.helper):
        with pytest.raises(SinkError, match="another process"):
            party.store.take_ownership()


def test_no_sum_of_before_is_left_in_the_file_after_a_release(fleet, tmp_path):
    shares = []
    for n in range(4):
        fleet.send(fleet.report(n, [n]))
        shares += [party.store.batch(START_S).share for party in (fleet.leader, fleet.helper)]
    fleet.close_batch()
    fleet.collect()
    for name in ("leader", "helper"):
        for path in filter(Path.is_file, tmp_path.glob(f"{name}.*")):
            left = path.read_bytes()
            assert not any(share[:64] in left for share in shares), path


def test_a_failed_job_stops_no_driver(fleet):
    fleet.leader.admit([fleet.report(0, [1]).encode()])
    step, failing = fleet.leader.process_job, [OSError("no space left"), ValueError("nonsense")]

    def fails_at_first():
        if failing:
            raise failing.pop()
        return step()

    fleet.leader.process_job = fails_at_first

    async def drive():
        driver = asyncio.create_task(Service(fleet.leader, None)._process_jobs())
        async with asyncio.timeout(30):
            while fleet.leader.store.waiting:
                await asyncio.sleep(0.01)
        driver.cancel()

    asyncio.run(drive())
    assert fleet.exact_sums()[1] == 1


def test_a_leader_that_fails_is_asked_again(fleet, monkeypatch):
    answers = [(503, "try again later"), (201, "")]
    monkeypatch.setattr(UploadConnection, "_post", lambda *_: answers.pop(0))
    task = replace(fleet.task, leader_url="https://127.0.0.1:1")
    receipt = upload_with_retry(task, b"report", ssl.create_default_context(), 30)
    assert (receipt.accepted, answers) == (True, [])


@pytest.mark.parametrize("answer", [(408, "too slow"), (408, "hung up"), (429, "x"), (503, "busy")])
def test_a_delayed_upload_is_sent_again(fleet, monkeypatch, answer):
    answers = [answer, (409, "replayed")]
    monkeypatch.setattr(UploadConnection, "_post", lambda *_: answers.pop(0))
    task = replace(fleet.task, leader_url="https://127.0.0.1:1")
    receipt = upload_with_retry(task, b"report", ssl.create_default_context(), 30)
    assert (receipt.accepted, answers) == (True, [])


def test_a_refused_report_is_not_sent_again(fleet, monkeypatch):
    for status, reason in ((410, "late"), (404, "unknown task"), (403, "tenant cap")):
        answers = [(status, reason)]
        monkeypatch.setattr(UploadConnection, "_post", lambda *_, answers=answers: answers.pop(0))
        task = replace(fleet.task, leader_url="https://127.0.0.1:1")
        receipt = upload_with_retry(task, b"report", ssl.create_default_context(), 30)
        assert (receipt.accepted, receipt.reason) == (False, reason)


def test_refused_uploads_write_and_sync_nothing(fleet, tmp_path, monkeypatch):
    good, stranger = fleet.report(0, [1]), Identity()
    assert fleet.send(good) == [""]
    syncs = []
    fdatasync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda file: syncs.append(file) or fdatasync(file))
    log = tmp_path / "leader.sqlite-wal"
    before = log.stat().st_size, log.stat().st_mtime_ns
    strangers = sign(stranger, replace(good, node=stranger.public)).encode()
    forged = replace(good, signature=bytes(64)).encode()
    for body in (b"x", good.encode()[:-1], bytes(fleet.task.max_report_bytes + 1), forged):
        assert fleet.leader.admit([body])[0] in ("malformed", "oversized", "forged")
    assert fleet.leader.admit([strangers, good.encode()]) == ["unknown node", "replayed"]
    assert fleet.leader.process_job() == 0
    assert syncs == []
    assert (log.stat().st_size, log.stat().st_mtime_ns) == before
    refused = {"malformed": 2, "oversized": 1, "forged": 1, "unknown node": 1, "replayed": 1}
    assert fleet.leader.store.refusals() == refused
    fleet.leader.expire()  # once a minute
    stored = sqlite3.connect(tmp_path / "leader.sqlite")
    assert dict(stored.execute("SELECT reason, count FROM refusal")) == refused
    stored.close()
