# SPDX-License-Identifier: Apache-2.0
"""What ordinary work looks like is no incident, and one cause is one incident."""

from __future__ import annotations

import msgspec
import pytest

from sonde.diagnose.case import Case
from sonde.diagnose.explain import explain
from sonde.diagnose.incident import Candidate, Change, FaultCause, Incident, Offender, Verdict
from sonde.diagnose.lost_time import lost_time
from sonde.diagnose.moments import (
    CodePlace,
    Facts,
    FlowUse,
    Moment,
    Place,
    ProcessMoment,
    Role,
    Usage,
    Wait,
    Who,
    Window,
)
from sonde.diagnose.open_incidents import AGAIN_NS, MOST, QUIET_NS, OpenIncidents
from sonde.diagnose.past import past
from sonde.diagnose.thread_time import Part
from sonde.diagnose.usual_range import begun, by_seconds

VICTIM, OTHER, CHILD = 100, 200, 101
TICK_NS = 250_000_000
TICKS = 40
PLACES = [
    CodePlace(Role.UNKNOWN, ""),
    CodePlace(Role.CODE, "step train.py:8"),
    CodePlace(Role.GARBAGE, "step train.py:8"),
    CodePlace(Role.INTERPRETER_LOCK, "step train.py:8"),
    CodePlace(Role.QUEUE, "step train.py:8"),
]
S = 10**9


def wait(tid, reason, share, waker=(0, 0), count=5, ready=0.0) -> Wait:
    return Wait(
        tid, reason, "", count, int(share * TICK_NS), int(ready * TICK_NS), 0, waker[0], waker[1]
    )


def process(cpu: dict[int, float], *waits: Wait, ready=0.0, place=1) -> ProcessMoment:
    """One tick of a process; `cpu`: shares of the tick by thread."""
    rows = [Wait(tid, "preempted", "", ready_ns=int(ready * TICK_NS)) for tid in list(cpu)[:1]]
    used = Usage(int(sum(cpu.values()) * TICK_NS), int(ready * TICK_NS))
    places = [Place(tid, "", place, share * TICK_NS) for tid, share in cpu.items()]
    return ProcessMoment(used, [*rows, *waits], places)


def moments(first: int, count: int, *kinds: dict[int, ProcessMoment]) -> list[Moment]:
    """Ticks in which processes (by pid) are like these in turn, each kind for a second."""
    return [
        Moment(
            (first + at) * TICK_NS, (first + at + 1) * TICK_NS, dict(kinds[at // 4 % len(kinds)])
        )
        for at in range(count)
    ]


def window(before: list[Moment], after: list[Moment], **facts) -> Window:
    who = {
        VICTIM: Who(VICTIM, "train", 1),
        OTHER: Who(OTHER, "neighbour", 1),
        CHILD: Who(CHILD, "worker", VICTIM),
    }
    known = {"cpus": 2, "cpus_allowed": 2, "allowed": [0, 1], "state": "R"}
    read = [Facts(time_ns=TICKS * TICK_NS, **known), Facts(time_ns=(TICKS + 4) * TICK_NS)]
    read[1] = msgspec.structs.replace(read[1], **{**known, **facts})
    return Window(VICTIM, 2, before, after, who, PLACES, read)


def judged(before: list[Moment], after: list[Moment], **facts) -> Verdict:
    found = explain(window(before, after, **facts), is_last_look=True)
    assert found is not None
    return found


STEADY = process({VICTIM: 0.9})
SLOW = process({VICTIM: 0.5}, ready=0.4)


def test_a_program_that_varies_as_much_by_itself_is_not_slower():
    phases = (
        {VICTIM: STEADY, OTHER: process({OTHER: 0.1})},
        {VICTIM: process({VICTIM: 0.4}, ready=0.5), OTHER: process({OTHER: 0.9})},
    )
    now = {VICTIM: SLOW, OTHER: process({OTHER: 0.9})}
    varied = judged(moments(0, TICKS, *phases), moments(TICKS, 4, now))
    steady = judged(moments(0, TICKS, phases[0]), moments(TICKS, 4, now))
    assert (varied.change, steady.change) == (Change.OWN_WORK, None)
    assert steady.cause == FaultCause.CPU_CONTENTION


def test_one_that_does_about_as_much_is_not_slower():
    before = moments(0, TICKS, {VICTIM: process({VICTIM: 0.5}, ready=0.02)})
    for now, change in ((0.48, Change.OWN_WORK), (0.4, None)):
        others = {OTHER: process({OTHER: 0.9})}
        slower = {VICTIM: process({VICTIM: now}, ready=0.3), **others}
        found = judged(before, moments(TICKS, 4, slower))
        assert (found.cause, found.change) == (FaultCause.CPU_CONTENTION, change)


def test_one_that_needs_more_cpu_time_than_it_lacks_has_more_to_do():
    usual = {VICTIM: process({VICTIM: 0.1}, ready=0.02)}
    before = moments(0, TICKS, usual)
    busier = {VICTIM: process({VICTIM: 0.5}, ready=0.3), OTHER: process({OTHER: 0.9})}
    found = judged(before, moments(TICKS, 4, busier), listens=True)
    assert (found.cause, found.change) == (FaultCause.CPU_CONTENTION, Change.LOAD)


def test_one_odd_second_before_hides_no_slowdown():
    usual = {VICTIM: STEADY, OTHER: process({OTHER: 0.1})}
    odd = {VICTIM: process({VICTIM: 0.2}, ready=0.7), OTHER: process({OTHER: 0.1})}
    now = {VICTIM: SLOW, OTHER: process({OTHER: 0.9})}
    before = (
        moments(0, TICKS - 8, usual) + moments(TICKS - 8, 4, odd) + moments(TICKS - 4, 4, usual)
    )
    assert judged(before, moments(TICKS, 4, now)).change is None


def test_a_slowdown_that_was_seen_late_is_compared_with_the_time_before_it():
    usual = {VICTIM: STEADY, OTHER: process({OTHER: 0.1})}
    now = {VICTIM: SLOW, OTHER: process({OTHER: 0.9})}
    before = moments(0, TICKS - 8, usual) + moments(TICKS - 8, 8, now)
    known = past(Case(window(before, moments(TICKS, 4, now))))
    assert known.waits_longer()


def test_two_seconds_of_a_past_are_too_few():
    usual = {VICTIM: STEADY, OTHER: process({OTHER: 0.1})}
    now = {VICTIM: SLOW, OTHER: process({OTHER: 0.9})}
    before = moments(TICKS - 8, 8, usual)
    assert judged(before, moments(TICKS, 4, now)).change == Change.OWN_WORK


def test_a_program_that_goes_on_to_wait_for_something_else_is_not_slower():
    stopped = process({VICTIM: 0.01}, wait(VICTIM, "futex", 0.98, (VICTIM, VICTIM + 1), 1))
    found = judged(moments(0, TICKS, {VICTIM: STEADY}), moments(TICKS, 4, {VICTIM: stopped}))
    assert found.change == Change.OWN_WORK


def test_whom_it_never_asked_before_does_not_answer_late():
    asks = process({VICTIM: 0.4}, wait(VICTIM, "socket", 0.5))
    asks.flows.append(FlowUse("10.0.0.2:80", "send", 5))
    found = judged(
        moments(0, TICKS, {VICTIM: STEADY}),
        moments(TICKS, 4, {VICTIM: asks}),
        peers={"10.0.0.2:80": "established"},
    )
    assert all(it.cause != FaultCause.REMOTE_DEPENDENCY for it in found.candidates)
    assert found.change == Change.OWN_WORK


def test_time_without_a_cpu_after_a_sync_is_part_of_the_sync():
    """The kernel's thread that ends it takes the CPU: nobody else is to blame."""
    syncs = process({VICTIM: 0.6}, wait(VICTIM, "sync to disk", 0.1, count=10, ready=0.25))
    usual = {VICTIM: STEADY, OTHER: process({OTHER: 0.1})}
    now = {VICTIM: syncs, OTHER: process({OTHER: 0.3})}
    found = judged(moments(0, TICKS, usual), moments(TICKS, 4, now))
    assert found.cause == FaultCause.FSYNC
    assert found.lost[Part.SYNC] == pytest.approx(0.35, abs=0.02)


def test_a_wait_for_a_thread_that_is_held_up_itself_is_no_lock():
    worker = VICTIM + 1
    before = process({VICTIM: 0.5, worker: 0.5})
    held_up = process(
        {VICTIM: 0.3, worker: 0.3},
        wait(VICTIM, "sync to disk", 0.3, count=10),
        wait(worker, "futex", 0.3, (VICTIM, VICTIM)),
    )
    lost = lost_time(window(moments(0, TICKS, {VICTIM: before}), moments(0, 4, {VICTIM: held_up})))
    assert lost.parts.get(Part.LOCK, 0.0) == pytest.approx(0.0, abs=0.01)


TURNS = [VICTIM, VICTIM + 1, VICTIM + 2, VICTIM + 3]


def _taking_turns(cpu: float, waited: float, ended_by=None, **held_up) -> ProcessMoment:
    """A tick of four threads that take turns with a lock; each waits for the one before it."""
    rows = [
        wait(tid, "futex", waited, (VICTIM, ended_by or TURNS[number - 1]))
        for number, tid in enumerate(TURNS)
    ]
    for reason, share in held_up.items():
        rows += [wait(tid, reason, share) for tid in TURNS]
    one = process(dict.fromkeys(TURNS, cpu), *rows)
    if not held_up:
        one.waits += [wait(tid, "preempted", 0.0, count=0, ready=0.2) for tid in TURNS]
    return one


@pytest.mark.parametrize(
    ("now", "lock"),
    [
        (_taking_turns(0.1, 0.7), 0.0),  # each lacks a CPU while it has the lock
        (_taking_turns(0.1, 0.7, sleep=0.2), 2.0),  # each sleeps with it
        (_taking_turns(0.1, 0.7, ended_by=VICTIM + 9), 2.0),  # another thread has it
    ],
)
def test_what_holds_up_threads_that_take_turns_is_no_lock(now, lock):
    before = _taking_turns(0.2, 0.2, stopped=0.0)
    lost = lost_time(window(moments(0, TICKS, {VICTIM: before}), moments(0, 4, {VICTIM: now})))
    assert lost.parts.get(Part.LOCK, 0.0) == pytest.approx(lock, abs=0.01)


def test_waits_in_a_queue_are_no_lock():
    idle = process({VICTIM: 0.4}, wait(VICTIM, "futex", 0.5, (VICTIM, VICTIM + 1)))
    idle.places.append(Place(VICTIM, "futex", 4, 0.5 * TICK_NS))
    lost = lost_time(window(moments(0, TICKS, {VICTIM: STEADY}), moments(0, 4, {VICTIM: idle})))
    assert lost.parts[Part.QUEUE] == pytest.approx(0.5, abs=0.01)
    assert lost.parts.get(Part.LOCK, 0.0) == pytest.approx(0.0, abs=0.01)


def test_a_worker_that_lacks_a_cpu_makes_its_program_lack_one():
    usual = {VICTIM: process({VICTIM: 0.6}), CHILD: process({CHILD: 0.9})}
    now = {
        VICTIM: process({VICTIM: 0.2}, wait(VICTIM, "read", 0.6, (CHILD, CHILD))),
        CHILD: process({CHILD: 0.4}, ready=0.5),
        OTHER: process({OTHER: 0.9}),
    }
    found = judged(moments(0, TICKS, usual), moments(TICKS, 4, now))
    assert (found.cause, found.change) == (FaultCause.CPU_CONTENTION, None)


def test_stacks_without_names_are_as_those_with_names():
    """In a program that computes most are seen once, and few of them are named in time."""
    collects = process({VICTIM: 0.6}, place=0)
    collects.places.append(Place(VICTIM, "", 2, 0.3 * TICK_NS))
    collects.usage.cpu_ns = int(0.9 * TICK_NS)
    lost = lost_time(window(moments(0, TICKS, {VICTIM: STEADY}), moments(0, 4, {VICTIM: collects})))
    assert lost.parts[Part.GARBAGE] == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize(
    ("now", "before", "count"),
    [
        (1.0, [0.1, 0.2, 0.1], 0),
        (0.2, [0.1, 0.2, 0.1], None),
        (0.4, [0.1, 0.1, 0.2, 0.9], 0),  # one odd second
        (0.3, [0.4, 0.1, 0.4, 0.1], None),
        (1.0, [1.1, 1.0, 0.9, 0.1, 0.2, 0.1], 2),  # it began some seconds ago
    ],
)
def test_what_is_beyond_the_usual_range(now, before, count):
    assert begun(now, before, 0.05) == count


def test_seconds_are_made_of_ticks_from_the_last_one_back():
    assert by_seconds([0.25] * 9) == [slice(5, 9), slice(1, 5)]
    assert by_seconds([0.5, 2.0]) == [slice(1, 2)]
    assert by_seconds([]) == []


def incident(cause: FaultCause, at_ns: int, name="train", change=None, pid=5) -> Incident:
    first = Candidate(cause, 1.0, (), (), Offender(7, "burner", "", ""))
    return Incident(pid, name, "", at_ns, at_ns, at_ns, (), Verdict((first,), 2.0, {}, change))


def test_others_that_the_same_cause_slows_are_parts_of_one_incident():
    known = OpenIncidents()
    first, second, third = (
        known.numbered(incident(FaultCause.CPU_CONTENTION, at * S, name, pid=at))
        for at, name in ((1, "a"), (2, "b"), (60, "c"))
    )
    assert (first.number, first.part_of) == (1, 0)
    assert (second.part_of, third.part_of) == (1, 1)


def test_a_lock_is_each_program_s_own():
    known = OpenIncidents()
    found = [
        known.numbered(incident(FaultCause.LOCK, at * S, name, pid=at)).part_of
        for at, name in ((1, "a"), (2, "b"), (3, "a"))
    ]
    assert found == [0, 0, 1]


def test_an_incident_that_was_over_is_news_when_it_comes_again():
    known = OpenIncidents()
    ends_ns = S + QUIET_NS
    found = [
        known.numbered(incident(FaultCause.RECLAIM, at_ns)).part_of
        for at_ns in (S, ends_ns, ends_ns + QUIET_NS + 1)
    ]
    assert found == [0, 1, 0]


def test_one_process_has_one_incident_while_it_is_slow():
    known = OpenIncidents()
    found = [
        known.numbered(incident(cause, at * S)).part_of
        for cause, at in (
            (FaultCause.UNKNOWN, 1), (FaultCause.LOCK, 4), (FaultCause.FROZEN, 30),
        )
    ]  # fmt: skip
    assert found == [0, 1, 0]


def test_one_that_goes_on_is_reported_again_after_a_while():
    known = OpenIncidents()
    times = range(S, S + AGAIN_NS + QUIET_NS, QUIET_NS)
    found = [known.numbered(incident(FaultCause.RECLAIM, at_ns)).part_of for at_ns in times]
    assert found == [0, 1, 1, 1, 1, 1]
    after_ns = S + AGAIN_NS + 1
    assert known.numbered(incident(FaultCause.RECLAIM, after_ns)).part_of == 0


def test_a_change_that_is_no_fault_is_part_of_nothing_and_begins_nothing():
    known = OpenIncidents()
    known.numbered(incident(FaultCause.UNKNOWN, S, change=Change.PASSED))
    assert known.numbered(incident(FaultCause.UNKNOWN, 2 * S)).part_of == 0


def test_any_number_of_programs_is_remembered_up_to_a_bound():
    known = OpenIncidents()
    for number in range(MOST + 1):
        known.numbered(incident(FaultCause.LOCK, S, f"program {number}", pid=number))
    last = known.numbered(incident(FaultCause.LOCK, S, f"program {MOST}", pid=-1))
    first = known.numbered(incident(FaultCause.LOCK, S, "program 0", pid=-2))
    assert (last.part_of, first.part_of) == (MOST + 1, 0)
