# SPDX-License-Identifier: Apache-2.0
"""A job that makes no progress: when that is noticed, which rank is named, and when none is."""

from __future__ import annotations

import msgspec
import pytest

from sonde.cli.incidents import as_text
from sonde.diagnose.causes.stalled import explain_stall
from sonde.diagnose.explain import explain
from sonde.diagnose.incident import Change, FaultCause, Incident
from sonde.diagnose.job import (
    JobFacts,
    JobLook,
    RankLook,
    RankThread,
    RasComm,
    RasRank,
    RasReport,
    StackFrame,
)
from sonde.diagnose.moments import Call, Moment, ProcessMoment, Usage, Window
from sonde.diagnose.outgoing import document
from sonde.diagnose.pace import JobPace

TICK_NS = 250_000_000
EXCHANGE = StackFrame("user", "gloo::allreduce", "libgloo.so")
DEVICE = StackFrame("user", "cuStreamSynchronize", "libcuda.so.580.1")
TRAIN = StackFrame("python", "train", "train.py", 40)
OTHER = StackFrame("python", "train", "train.py", 52)
LOAD = StackFrame("python", "load", "train.py", 12)


def kernel(name: str) -> StackFrame:
    return StackFrame("kernel", name, "[kernel]")


WAITS = (kernel("tcp_recvmsg"), EXCHANGE, TRAIN)
SLEEPS = (kernel("hrtimer_nanosleep"), LOAD)


def rank(number: int, frames, state="S", **more) -> RankLook:
    threads = (RankThread(100 + number, "python", state, tuple(frames)),) if frames else ()
    return RankLook(number, 100 + number, "python", state, threads=threads, **more)


def job(*ranks: RankLook, quiet_s=6.0, ras=None, before=None) -> JobFacts:
    looks = (JobLook(1, before or ranks), JobLook(2, ranks, ras))
    return JobFacts("job 7", quiet_s, 0.0, looks)


def found(*ranks: RankLook, **more):
    return explain_stall(job(*ranks, **more))


@pytest.mark.parametrize(
    ("frames", "state", "doing"),
    [
        (SLEEPS, "S", "sleeps"),
        ((kernel("futex_wait"), LOAD), "S", "waits for a lock"),
        ((kernel("locks_lock_inode_wait"), LOAD), "S", "waits for a lock"),
        ((kernel("pipe_read"), LOAD), "S", "waits for a pipe"),
        ((kernel("fuse_simple_request"), LOAD), "D", "waits for a file"),
        ((kernel("schedule"), LOAD), "D", "waits for a file"),
        ((kernel("do_wait"), LOAD), "S", "waits for a child process"),
        ((kernel("tcp_recvmsg"), LOAD), "S", "waits for a socket"),
        ((LOAD,), "R", "runs"),
        ((LOAD,), "T", "stopped by a signal or a debugger"),
    ],
)
def test_the_rank_that_is_not_there_is_named_with_its_line(frames, state, doing):
    verdict = found(rank(0, WAITS), rank(1, frames, state), rank(2, WAITS))

    assert (verdict.cause, verdict.change) == (FaultCause.STALLED_JOB, None)
    missing = [one for one in verdict.ranks if one.is_missing]
    assert [(one.rank, one.doing, one.line) for one in missing] == [(1, doing, "load train.py:12")]
    assert missing[0].stack[-1] == "load train.py:12"
    assert "ranks 0, 2 wait in a collective, in train train.py:40" in verdict.candidates[0].evidence


def test_a_rank_that_has_ended_is_the_missing_one():
    gone = RankLook(1, 101, "python", "")
    verdict = found(rank(0, WAITS), gone)
    assert verdict.cause == FaultCause.STALLED_JOB
    assert "rank 1 (101) is missing: has ended" in verdict.candidates[0].evidence


def test_ranks_that_wait_for_their_device_wait_for_the_missing_one():
    verdict = found(rank(0, (DEVICE, TRAIN), "R"), rank(1, SLEEPS))
    assert [one.rank for one in verdict.ranks if one.is_missing] == [1]


def test_a_rank_whose_gradients_are_computed_by_another_thread_waits_for_its_device():
    main = RankThread(
        100, "python", "S",
        (kernel("futex_wait"), StackFrame("user", "wait", "libtorch_python.so"), TRAIN),
    )  # fmt: skip
    backward = RankThread(150, "pt_autograd_0", "R", (DEVICE,))
    verdict = found(RankLook(0, 100, "python", "S", threads=(main, backward)), rank(1, SLEEPS))
    assert [one.rank for one in verdict.ranks if one.is_missing] == [1]


def test_a_rank_that_works_alone_is_no_fault_for_a_while():
    ranks = rank(0, (LOAD,), "R", cpu=0.9), rank(1, WAITS)
    verdict = found(*ranks)
    assert verdict.change == Change.OWN_WORK
    assert "works alone, in load train.py:12" in verdict.reason
    later = found(*ranks, quiet_s=40.0)
    assert (later.cause, later.change) == (FaultCause.STALLED_JOB, None)
    assert any("it may go on" in text for text in later.candidates[0].against)


def test_a_rank_that_waits_to_be_asked_is_no_fault():
    asked = rank(0, (kernel("ep_poll"), LOAD), listens=True)
    assert found(asked, rank(1, WAITS)).change == Change.LOAD


def test_all_ranks_in_the_same_collective_are_no_stall_until_it_lasts():
    assert found(rank(0, WAITS), rank(1, WAITS)) is None
    verdict = found(rank(0, WAITS), rank(1, WAITS), quiet_s=25.0)
    assert verdict.cause == FaultCause.UNKNOWN
    assert "elsewhere" in verdict.candidates[0].against[0]


def test_different_collectives_are_a_mismatch():
    verdict = found(rank(0, WAITS), rank(1, (kernel("tcp_recvmsg"), EXCHANGE, OTHER)))
    assert verdict.cause == FaultCause.COLLECTIVE_MISMATCH
    assert "rank 1 (101) in train train.py:52" in verdict.candidates[0].evidence


def test_what_changes_between_two_looks_is_no_stall():
    before = rank(0, SLEEPS), rank(1, WAITS)
    assert found(rank(0, WAITS), rank(1, SLEEPS), before=before) is None
    moved = rank(0, (kernel("tcp_recvmsg"), EXCHANGE, OTHER)), rank(1, SLEEPS)
    assert found(rank(0, WAITS), rank(1, SLEEPS), before=moved) is None


def test_without_stacks_nobody_is_named():
    ranks = rank(0, (), failed="no"), rank(1, (), failed="no")
    assert found(*ranks) is None
    assert found(*ranks, quiet_s=25.0).cause == FaultCause.UNKNOWN


def ras(*ranks: RasRank) -> RasReport:
    return RasReport("2.28.9", (RasComm("0xa", 2, ranks),))


def test_ras_confirms_or_speaks_against():
    ranks = rank(0, WAITS), rank(1, SLEEPS)
    agrees = ras(RasRank(0, 100, {"AllReduce": 9}), RasRank(1, 101, {"AllReduce": 8}))
    evidence = found(*ranks, ras=agrees).candidates[0].evidence
    assert "NCCL RAS: rank 1 (101) launched AllReduce 8 of 9" in evidence
    differs = ras(RasRank(0, 100, {"AllReduce": 8}), RasRank(1, 101, {"AllReduce": 9}))
    candidate = found(*ranks, ras=differs).candidates[0]
    assert candidate.share < 1.0
    assert candidate.against == ("NCCL RAS: rank 0 is behind, too: launched AllReduce 8 of 9",)
    three = rank(0, WAITS), rank(1, SLEEPS), rank(2, WAITS)
    both = ras(
        RasRank(0, 100, {"AllReduce": 9}),
        RasRank(1, 101, {"AllReduce": 8}),
        RasRank(2, 102, {"AllReduce": 7}),
    )
    against = found(*three, ras=both).candidates[0].against
    assert against == ("NCCL RAS: rank 2 is behind, too: launched AllReduce 7 of 9",)
    silent = found(*ranks, ras=RasReport(failed="it gave no whole answer in time"))
    assert silent.cause == FaultCause.STALLED_JOB


def test_where_all_wait_alike_ras_shows_who_is_behind():
    ranks = rank(0, (DEVICE, TRAIN), "R"), rank(1, (DEVICE, TRAIN), "R")
    report = ras(RasRank(0, 100, {"AllReduce": 9}), RasRank(1, 101, {}, True))
    verdict = found(*ranks, ras=report)
    assert verdict.cause == FaultCause.STALLED_JOB
    assert "rank 1 (101) does not answer" in verdict.candidates[0].evidence[0]


def test_it_goes_through_a_window_and_out_again():
    facts = job(rank(0, WAITS), rank(1, SLEEPS))
    window = Window(101, 0, [], [], {}, [], [], ["progress of the job"], facts)
    again = msgspec.json.decode(msgspec.json.encode(window), type=Window)
    verdict = explain(again, is_last_look=True)
    incident = Incident(101, "python", "job 7", 0, 10**9, 2 * 10**9, ("progress",), verdict)
    text = as_text(incident)
    assert "its job makes no progress: stalled-job" in text
    assert "      hrtimer_nanosleep [kernel]" in text
    out = document(incident, "node", 0)
    assert [(one["rank"], one["missing"]) for one in out["ranks"]] == [(1, True), (0, False)]


def tick(number: int, *ranks: tuple[float, int, int]) -> Moment:
    """Of each rank: CPUs, voluntary switches, calls of its device, in a tick."""
    found = {
        100 + at: ProcessMoment(
            Usage(int(cpu * TICK_NS), voluntary=switches), calls=[Call("cuLaunchKernel", calls)]
        )
        for at, (cpu, switches, calls) in enumerate(ranks)
    }
    return Moment(number * TICK_NS, (number + 1) * TICK_NS, found)


WORKS, IDLE, SPINS = (0.8, 40, 50), (0.0, 1, 0), (1.0, 40, 0)


def paced(*states, usual=(WORKS, WORKS)) -> JobPace:
    pace = JobPace((100, 101))
    for number in range(40):
        pace.add(tick(number, *usual))
    for number, state in enumerate(states, 40):
        pace.add(tick(number, *state))
    return pace


def test_a_job_that_goes_on_is_not_quiet():
    assert paced().quiet_since_ns == 0
    # One rank's loader is slow, and the devices still work.
    assert paced(*[((0.0, 1, 40), WORKS)] * 20).quiet_s == 0


def test_a_job_that_stopped_is_due_after_two_seconds():
    assert not paced(*[(SPINS, IDLE)] * 7).is_due
    pace = paced(*[(SPINS, IDLE)] * 8)
    assert pace.is_due
    assert pace.quiet_since_ns == 40 * TICK_NS
    assert pace.symptoms[101] == "CPU time"


def test_a_usual_pause_puts_it_off_and_a_reported_stall_does_not():
    pause = [(SPINS, IDLE)] * 16
    pace = paced(*pause, *[(WORKS, WORKS)] * 8, *[(SPINS, IDLE)] * 20)
    assert pace.longest_pause_s == pytest.approx(4.0)
    assert not pace.is_due
    again = paced(*pause)
    again.note_stall()
    for number in range(80, 84):
        again.add(tick(number, WORKS, WORKS))
    assert again.longest_pause_s == 0


def test_a_rank_that_ended_is_a_sign():
    pace = paced()
    for number in range(40, 50):
        pace.add(tick(number, SPINS), ended={101})
    assert pace.is_due


def test_a_job_without_a_past_is_never_due():
    pace = JobPace((100, 101))
    for number in range(30):
        pace.add(tick(number, IDLE, IDLE))
    assert not pace.is_due
