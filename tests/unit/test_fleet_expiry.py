# SPDX-License-Identifier: Apache-2.0
"""What nobody collects is kept for a stated time and no longer, and is not taken twice for it."""

import asyncio
import os
import sqlite3
import threading
from dataclasses import replace

import pytest

from sonde.errors import UsageError
from sonde.fleet import aggregator
from sonde.fleet.aggregator import HelperUnavailable, Refused
from sonde.fleet.evaluation.local_deployment import HOUR_S, START_S, LocalDeployment, small_task
from sonde.fleet.service import Service
from sonde.fleet.wire import Item, Reply, decode_replies, encode_job

HELD = ("waiting", "seen", "contribution", "contributor", "job", "batch", "latency")


@pytest.fixture
def fleet(tmp_path):
    made = LocalDeployment(tmp_path, small_task(tenant_cap=5), ["a", "a", "b", "b", "b", "c"])
    yield made
    made.close()


def rows(store, tables=HELD):
    with store._database.reading() as db:
        return {t: db.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in tables}


def expire(fleet, start_s=START_S):
    fleet.now_s = float(fleet.task.expires_s(start_s))
    return fleet.leader.expire(), fleet.helper.expire()


def test_a_batch_that_nobody_collects_goes_with_all_that_it_held_and_is_counted(fleet, tmp_path):
    fleet.send(*(fleet.report(n, [1]) for n in range(3)))
    shares = [party.store.batch(START_S).share for party in (fleet.leader, fleet.helper)]
    fleet.now_s = fleet.task.expires_s(START_S) - 1.0
    assert (fleet.leader.expire(), fleet.helper.expire()) == (0, 0)
    assert expire(fleet) == (3, 3)
    for party in (fleet.leader, fleet.helper):
        assert set(rows(party.store).values()) == {0}
        assert party.store.refusals() == {"expired": 3}
        assert party.expire() == 0  # once
    for path in tmp_path.glob("*.sqlite*"):
        if path.is_file():
            assert not any(share[:64] in path.read_bytes() for share in shares), path


def test_a_late_collection_is_refused_as_expired_and_costs_nothing(fleet):
    fleet.send(*(fleet.report(n, [1]) for n in range(3)))
    fleet.now_s = float(fleet.task.expires_s(START_S))  # before anyone has looked
    with pytest.raises(Refused, match="kept for 7 days") as refused:
        fleet.collect()
    assert (refused.value.reason, refused.value.status) == ("expired", 410)
    expire(fleet)
    for ask in (fleet.leader.release, fleet.helper.check_release):
        with pytest.raises(Refused, match="kept for 7 days"):
            ask(START_S, HOUR_S)
    assert fleet.helper.store.ledger() == fleet.leader.store.ledger() == []


@pytest.mark.parametrize("clock", ["right", "set back"])
def test_a_report_that_nobody_remembers_is_refused_by_its_age(fleet, clock):
    report = fleet.report(0, [1])
    fleet.send(report)
    began_s = fleet.now_s
    expire(fleet)
    if clock == "set back":
        fleet.now_s = began_s
    assert fleet.send(report) == ["late"]
    answer = fleet.helper.process_job(encode_job(os.urandom(16), [Item.of(report, b"")]))
    assert decode_replies(answer, 1) == [Reply(None, "late")]
    assert set(rows(fleet.helper.store).values()) == {0}
    assert fleet.exact_sums() == [0] * 16


def test_reports_that_wait_in_vain_go_too(tmp_path):
    def wrap(post):
        def away(path, body):
            raise HelperUnavailable

        return away

    fleet = LocalDeployment(tmp_path, small_task(), ["a"] * 4, wrap)
    with pytest.raises(HelperUnavailable):
        fleet.send(*(fleet.report(n, [1]) for n in range(4)))
    assert fleet.leader.store.waiting == 4
    assert expire(fleet)[0] == 4
    assert (fleet.leader.store.waiting, fleet.leader.store._cached) == (0, {})
    assert set(rows(fleet.leader.store).values()) == {0}
    assert fleet.leader.process_job() == 0
    fleet.close()
    fleet.open()
    assert list(tmp_path.rglob("*.reports")) == []
    fleet.close()


def test_what_has_expired_while_a_party_was_down_goes_when_it_starts(fleet):
    fleet.send(fleet.report(0, [1]), fleet.report(1, [1]))
    fleet.close()
    fleet.now_s = float(fleet.task.expires_s(START_S))
    fleet.open()
    for party in (fleet.leader, fleet.helper):
        assert set(rows(party.store).values()) == {0}
        assert party.store.refusals() == {"expired": 2}


def test_an_old_answer_goes_its_cost_stays_and_it_is_never_drawn_again(fleet):
    fleet.send(fleet.report(0, [1]), fleet.report(1, [1]))
    fleet.close_batch()
    fleet.collect()
    assert expire(fleet) == (0, 0)
    for party in (fleet.leader, fleet.helper):
        assert [entry.start_s for entry in party.store.ledger()] == [START_S]
        assert party.store.released(START_S) == b""
        with pytest.raises(Refused, match="kept for"):
            party.check_release(START_S, HOUR_S)
        assert "expired" not in party.store.refusals()  # nothing was lost


def test_a_job_of_which_nothing_can_be_taken_leaves_nothing_behind(fleet):
    report = fleet.report(0, [1])
    fleet.send(report)
    before = rows(fleet.helper.store)
    for at in (0, 2**64 - 1):  # times that no batch of a database has
        odd = replace(report, time_s=at)
        reply = decode_replies(
            fleet.helper.process_job(encode_job(os.urandom(16), [Item.of(odd, b"")])), 1
        )
        assert reply[0].reason in ("late", "early")
    again = fleet.helper.process_job(encode_job(os.urandom(16), [Item.of(report, b"")]))
    assert decode_replies(again, 1) == [Reply(None, "replayed")]
    assert rows(fleet.helper.store) == before


def test_nothing_is_added_to_a_batch_while_it_is_released(fleet):
    fleet.send(fleet.report(0, [1]), fleet.report(1, [1]))
    late = Item.of(fleet.report(2, [1]), b"x")
    fleet.close_batch()
    batch, answers, threads = fleet.helper.store.batch, [], []

    def meanwhile(start_s):
        found = batch(start_s)
        if not threads:
            body = encode_job(os.urandom(16), [late])
            threads.append(
                threading.Thread(target=lambda: answers.append(fleet.helper.process_job(body)))
            )
            threads[0].start()
            threads[0].join(0.3)
        return found

    fleet.helper.store.batch = meanwhile
    fleet.collect()
    threads[0].join()
    assert [decode_replies(answer, 1) for answer in answers] == [[Reply(None, "late")]]
    assert set(rows(fleet.helper.store).values()) == {0}


def test_a_job_whose_answer_no_longer_fits_is_ended_and_spoils_its_own_batch_alone(tmp_path):
    broken = [True]

    def wrap(post):
        def deaf(path, body):
            answer = post(path, body)
            if broken:
                raise HelperUnavailable
            return answer

        return deaf

    fleet = LocalDeployment(tmp_path, small_task(), ["a"] * 4, wrap)
    with pytest.raises(HelperUnavailable):
        fleet.send(*(fleet.report(n, [n]) for n in range(3)))
    fleet.close()
    (segment,) = tmp_path.rglob("*.reports")
    half = segment.stat().st_size // 3
    segment.write_bytes(bytes(half) + segment.read_bytes()[half:])  # one of three is lost
    broken.clear()
    fleet.open()
    while fleet.leader.process_job():
        pass
    assert fleet.leader.store.waiting == 0
    assert fleet.leader.store.refusals() == {"lost on disk": 1, "mismatch": 2}
    fleet.send(fleet.report(3, [3]))
    fleet.close_batch()
    with pytest.raises(Refused):
        fleet.collect()
    assert fleet.helper.store.ledger() == []
    start_s = fleet.task.batch_of(int(fleet.now_s))
    fleet.send(*(fleet.report(n, [n]) for n in range(3)))
    fleet.close_batch()
    fleet.collect(start_s)
    fleet.close()


def test_what_a_reader_kept_in_the_log_goes_later(fleet, tmp_path):
    fleet.send(fleet.report(0, [1]), fleet.report(1, [1]))
    share = fleet.leader.store.batch(START_S).share
    fleet.leader.store._database._db.execute("PRAGMA busy_timeout=0")
    reader = sqlite3.connect(tmp_path / "leader.sqlite", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM batch").fetchone()
    fleet.close_batch()
    fleet.collect()

    def left():
        files = [path for path in tmp_path.glob("leader.sqlite*") if path.is_file()]
        return any(share[:64] in path.read_bytes() for path in files)

    assert left()
    reader.close()
    fleet.leader.expire()
    assert not left()


def test_a_state_of_another_task_is_refused(fleet, tmp_path):
    fleet.close()
    good = fleet.task
    fleet.task = small_task(budget=1e6)
    with pytest.raises(UsageError, match="another task"):
        fleet.open()
    fleet.task = good
    fleet.open()


def test_the_service_lets_batches_expire_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("sonde.fleet.service._EXPIRE_INTERVAL_S", 0.02)
    fleet = LocalDeployment(tmp_path, small_task(), ["a"] * 2)
    fleet.send(fleet.report(0, [1]))
    fleet.now_s = float(fleet.task.expires_s(START_S))
    failing = [OSError("no space left")]
    run = aggregator.Aggregator.expire

    def fails_at_first(party):
        if failing:
            raise failing.pop()
        return run(party)

    monkeypatch.setattr(aggregator.Aggregator, "expire", fails_at_first)

    async def sweep():
        sweeper = asyncio.create_task(Service(fleet.leader, None)._expire_batches())
        async with asyncio.timeout(30):
            while not fleet.leader.store.refusals():
                await asyncio.sleep(0.01)
        sweeper.cancel()

    asyncio.run(sweep())
    assert fleet.leader.store.refusals() == {"expired": 1}
    fleet.close()
