# SPDX-License-Identifier: Apache-2.0
"""What watching jobs may hold and cost, whatever its processes are."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sonde.agent import job_watch, stall_reports
from sonde.agent.job_finder import BY_START, Job, Rank
from sonde.agent.job_watch import MAX_CANDIDATES, MAX_JOBS, PARTS, JobWatch
from sonde.agent.rank_dump import MEMORY_BYTES
from sonde.agent.rank_stacks import RankStackReader
from sonde.agent.slowdown_watcher import Watcher
from sonde.agent.stall_reports import StallReports
from sonde.diagnose.incident import Candidate, FaultCause, Incident, Verdict
from sonde.diagnose.pace import JobPace


@pytest.fixture
def watch(monkeypatch):
    it = JobWatch(
        StallReports(lambda *_: None), lambda *_: None,
        lambda pid: SimpleNamespace(owner="", name=""), lambda _: None,
    )  # fmt: skip
    monkeypatch.setattr(it._stacks, "take", lambda *_: {})
    yield it
    it.close()


def job(number, party):
    ranks = tuple(Rank(10 * number + at, 5, at) for at in range(2))
    return Job("", ranks, "RANK", party)


def found(watch, *jobs):
    watch._finder.find = lambda *_: list(jobs)
    watch._find()
    return [one.job for one in watch._jobs]


def test_jobs_are_bounded_and_those_left_out_are_counted_once(watch):
    many = [job(number, number) for number in range(1, MAX_JOBS + 6)]
    # One look after another, as they come.
    for at in range(1, len(many) + 1):
        found(watch, *many[:at])
    assert len(watch._jobs) == MAX_JOBS
    found(watch, *many)
    assert watch.losses["diagnose.jobs"] == 5


def test_a_party_has_a_part_of_the_jobs(watch):
    its = [job(number, 1000) for number in range(1, 20)]
    other = job(50, 1001)
    watched = found(watch, *its, other)
    assert len(watched) == MAX_JOBS // PARTS + 1
    assert other in watched
    assert watch.losses["diagnose.jobs"] == len(its) - MAX_JOBS // PARTS


def test_the_machines_own_root_may_have_all_jobs(watch):
    assert len(found(watch, *(job(number, 0) for number in range(1, 30)))) == MAX_JOBS


def test_a_job_that_grew_takes_its_own_place(watch):
    its = [job(number, 1000) for number in range(1, MAX_JOBS // PARTS + 1)]
    found(watch, *its)
    grown = Job("", (*its[0].ranks, Rank(99, 5, 2)), "RANK", 1000)
    watched = found(watch, grown)
    assert len(watched) == MAX_JOBS // PARTS
    assert grown in watched
    assert its[0] not in watched


def test_a_job_of_which_a_part_was_looked_into_stays_whole(watch):
    ranks = tuple(Rank(100 + at, 5, at) for at in range(8))
    whole = Job("", ranks, "RANK", 1000)
    found(watch, whole)
    part = Job("", (*ranks[:3], Rank(99, 5, 8)), "RANK", 1000)
    assert found(watch, part) == [whole]
    watch._jobs[0].ended.update(rank.pid for rank in ranks[3:])
    assert found(watch, part) == [part]


def ranks(*its):
    return tuple(Rank(pid, 5, number, owner) for pid, number, owner in its)


OURS = ranks((10, 0, "docker a"), (11, 1, "docker a"))


def guest(pid, number=0):
    return ranks((pid, number, "docker b"))


def test_a_stranger_that_comes_and_goes_changes_neither_numbers_nor_pace(watch, monkeypatch):
    found(watch, Job("", OURS, "RANK", 0))
    (one,) = watch._jobs
    pace = one.pace
    pace._quiet_ns, one.is_reported = 7, True
    for pid in range(20, 30):
        found(watch, Job("", (*guest(pid), *OURS), BY_START, 0))
        assert watch._jobs == [one]
        assert (one.pace, one.is_reported, one.job.numbered_by) == (pace, True, "RANK")
        assert [(r.pid, r.number) for r in one.job.ranks] == [(10, 0), (11, 1), (pid, 2)]
        monkeypatch.setattr(job_watch, "_state", lambda r: "" if r.pid >= 20 else "S")
        watch._note_ended()
        assert one.job.ranks == OURS
        assert not one.ended


def test_who_joined_later_makes_no_pause():
    pace = JobPace([10])
    pace.admit([20])
    usage = SimpleNamespace(cpu_ns=10**8, voluntary=50, read_bytes=0, written_bytes=0)
    it = SimpleNamespace(usage=usage, calls=())

    def moment(at, *pids):
        its = dict.fromkeys(pids, it)
        return SimpleNamespace(processes=its, seconds=0.25, start_ns=at, end_ns=at + 1)

    for at in range(1, 40):
        pace.add(moment(at, 10, 20))
    for at in range(40, 50):
        pace.add(moment(at, 10), {20})
    assert not pace.quiet_since_ns
    pace.add(moment(50, 20))
    assert pace.quiet_since_ns == 50
    assert pace.use_of(20)[0] > 0  # whether it works meanwhile


def test_a_rank_of_another_container_keeps_its_number_where_it_is_free(watch):
    found(watch, Job("", OURS, "RANK", 0))
    found(watch, Job("", (*OURS, *guest(20, 5)), "RANK", 0))
    (one,) = watch._jobs
    assert [rank.number for rank in one.job.ranks] == [0, 1, 5]


def test_a_job_does_not_live_on_by_a_stranger(watch, monkeypatch):
    found(watch, Job("", OURS, "RANK", 0))
    found(watch, Job("", (*OURS, *guest(20)), "RANK", 0))
    monkeypatch.setattr(job_watch, "_state", lambda rank: "S" if rank.pid == 20 else "")
    watch._note_ended()
    assert watch._jobs == []


def test_jobs_of_two_containers_stay_two(watch):
    first = Job("", OURS, "RANK", 0)
    second = Job("", guest(20) + guest(21, 1), "RANK", 0)
    found(watch, first, second)
    assert found(watch, Job("", OURS + second.ranks, BY_START, 0)) == [first, second]


def test_a_job_that_its_own_owner_starts_again_is_a_new_one(watch):
    found(watch, Job("", OURS, "RANK", 0))
    watch._jobs[0].ended.add(11)
    again = Job("", (OURS[0], *ranks((12, 1, "docker a"))), "RANK", 0)
    assert found(watch, again) == [again]


def test_a_namespace_is_that_of_the_pod_that_the_process_is_in_now(watch):
    uid = "12345678-1234-1234-1234-123456789abc"
    who = SimpleNamespace(owner="team/worker-0", cgroup=f"/kubepods/burstable/pod{uid}/x")
    watch._who_of = lambda _: who
    assert watch._namespace_of(9, uid) == "team"
    assert watch._namespace_of(9, "another") == ""
    who.owner = "pod 12345678-1234"
    assert watch._namespace_of(9, uid) == ""


def test_nobody_waits_while_it_is_looked_who_has_ended(watch, monkeypatch):
    found(watch, job(1, 1000))
    held = []

    def state(rank):
        held.append(watch._lock.locked())
        return "" if rank.number else "S"

    monkeypatch.setattr(job_watch, "_state", state)
    watch._note_ended()
    assert held == [False, False]
    assert watch._jobs[0].ended == {11}
    assert watch.ranks() == [10]
    monkeypatch.setattr(job_watch, "_state", lambda _: "")
    watch._note_ended()
    assert watch._jobs == []


def test_ranks_beyond_the_limit_have_the_reason_why_they_have_no_stacks(watch, monkeypatch):
    ranks = tuple(Rank(10 + number, 5, number) for number in range(job_watch.MAX_STACKS + 2))
    found(watch, Job("", ranks, "RANK", 1000))
    monkeypatch.setattr(job_watch, "_state", lambda _: "S")
    monkeypatch.setattr(job_watch, "listening", lambda _: set())
    failed = [rank.failed for rank in watch._look(watch._jobs[0], None).ranks]
    in_time, beyond = failed[: job_watch.MAX_STACKS], failed[job_watch.MAX_STACKS :]
    assert set(in_time) == {"its stack was not taken in time"}
    assert set(beyond) == {job_watch.NOT_WALKED}


def test_symptoms_that_end_during_a_look_are_those_of_its_begin(watch, monkeypatch):
    found(watch, job(1, 1000))
    (one,) = watch._jobs

    class Symptoms(dict):
        """As the tick's thread has it: between two reads it may be another one."""

        def __contains__(self, pid):
            one.pace.symptoms = {}
            return dict.__contains__(self, pid)

    monkeypatch.setattr(job_watch.time, "sleep", lambda _: None)
    monkeypatch.setattr(job_watch, "ask", lambda _: None)
    monkeypatch.setattr(watch, "_look", lambda *_: None)
    seen = []
    monkeypatch.setattr(job_watch, "victim", lambda facts: seen.append(facts))
    one.pace._quiet_ns, one.pace._now_ns = 1, 3_000_000_001
    one.pace.symptoms = Symptoms({10: "CPU time", 11: "waits"})
    watch._look_into(one)
    assert seen[0].symptoms == ("rank 0: CPU time", "rank 1: waits")


def test_jobs_are_looked_at_by_turns(watch, monkeypatch):
    found(watch, job(1, 1000), job(2, 1000), job(3, 1000), job(4, 1001))
    done = []
    monkeypatch.setattr(watch, "_note_ended", lambda: None)
    monkeypatch.setattr(watch, "_find", lambda: None)
    monkeypatch.setattr(watch, "_is_due", lambda one: one.job.ranks[0].pid not in done)

    def look(one):
        done.append(one.job.ranks[0].pid)
        watch._ended = len(done) >= 4

    monkeypatch.setattr(watch, "_look_into", look)
    watch._due.set()
    began_s = time.monotonic()
    watch._run()
    assert done == [10, 40, 20, 30]
    assert time.monotonic() - began_s < 0.4  # it waited for nothing in between


@pytest.mark.parametrize("goes_on", [True, False])
def test_what_is_kept_back_waits_for_no_look(monkeypatch, goes_on):
    """It is due after a while, or once the job goes on, however long a look takes."""
    monkeypatch.setattr(stall_reports, "HOLD_S", 60.0 if goes_on else 0.3)
    reported, looks, looked_at = [], threading.Event(), threading.Event()
    reports = StallReports(lambda incident, _: reported.append(incident.victim))
    who = SimpleNamespace(owner="", name="")
    watch = JobWatch(reports, lambda *_: None, lambda _: who, lambda _: None)
    found(watch, job(1, 1000))
    monkeypatch.setattr(watch, "_note_ended", lambda: None)
    monkeypatch.setattr(watch, "_find", lambda: None)
    monkeypatch.setattr(watch, "_is_due", lambda _: True)
    monkeypatch.setattr(watch, "_look_into", lambda _: (looked_at.set(), looks.wait(20)))
    try:
        reports.update(100, [((10, 11), 100)])
        watch._due.set()
        watch.start()
        assert looked_at.wait(5)
        verdict = Verdict((Candidate(FaultCause.LOCK, 1.0, ()),), 1.0, {}, None)
        reports.offer(Incident(10, "python", "", 100, 100, 100, (), verdict), None)
        time.sleep(0.1)
        assert not reported
        if goes_on:
            reports.update(101, [])
        until_s = time.monotonic() + 5
        while not reported and time.monotonic() < until_s:
            time.sleep(0.02)
        assert reported == [10]
        assert not looks.is_set()
    finally:
        watch.close()
        looks.set()
        watch._thread.join(10)


def test_a_report_that_fails_keeps_no_other_back(monkeypatch):
    monkeypatch.setattr(stall_reports, "HOLD_S", 0.0)
    reported, failures = [], []

    def report(incident, _):
        reported.append(incident.victim)
        if len(reported) == 1:
            raise OSError("no room")

    reports = StallReports(report)
    reports.start(failures.append)
    verdict = Verdict((Candidate(FaultCause.LOCK, 1.0, ()),), 1.0, {}, None)
    for pid in (10, 11):
        reports.update(100, [((10, 11), 100)])
        reports.offer(Incident(pid, "python", "", 100, 100, 100, (), verdict), None)
        until_s = time.monotonic() + 5
        while pid not in reported and time.monotonic() < until_s:
            time.sleep(0.02)
    reports.close()
    assert reported == [10, 11]
    assert len(failures) == 1


def test_the_last_answer_comes_before_what_is_kept_back_is_reported():
    ended = []
    watcher = Watcher.__new__(Watcher)
    watcher._jobs = SimpleNamespace(close=lambda: ended.append("jobs"))
    watcher._explainer = SimpleNamespace(close=lambda: ended.append("explainer"))
    watcher.close()
    assert ended == ["explainer", "jobs"]


def test_candidates_that_were_left_out_are_a_loss(watch):
    watch._finder.left_out = 7
    assert watch.losses["diagnose.job_candidates"] == 7


def test_candidates_are_bounded(watch):
    moment = SimpleNamespace(seconds=1.0, processes={}, end_ns=1)
    watch.on_moment(moment, range(1, 3 * MAX_CANDIDATES))
    assert len(watch._candidates) == MAX_CANDIDATES
    assert watch.losses["diagnose.job_candidates"] == 2 * MAX_CANDIDATES - 1


def test_the_child_that_takes_stacks_is_bounded():
    reader = RankStackReader()
    try:
        pid = reader._running_child().pid
        until_s = time.monotonic() + 30
        while time.monotonic() < until_s:
            limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
            (data,) = [line.split() for line in limits if line.startswith("Max data size")]
            score = Path(f"/proc/{pid}/oom_score_adj").read_text().strip()
            if data[3] == str(MEMORY_BYTES) and score == "1000":
                break
            threading.Event().wait(0.05)
        assert (data[3], score) == (str(MEMORY_BYTES), "1000")
        assert os.getpriority(os.PRIO_PROCESS, pid) > 0
    finally:
        reader.close()
