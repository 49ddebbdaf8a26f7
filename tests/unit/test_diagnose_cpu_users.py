# SPDX-License-Identifier: Apache-2.0
"""Who took the CPUs: also where that one spreads its work over many processes."""

from __future__ import annotations

import random

from sonde.diagnose.explain import explain
from sonde.diagnose.incident import FaultCause, Offender
from sonde.diagnose.moments import (
    CodePlace,
    Facts,
    Moment,
    Place,
    ProcessMoment,
    Role,
    Usage,
    Wait,
    Who,
    Window,
)

VICTIM, SPAWNER, NEIGHBOUR, MAKE = 100, 150, 200, 250
TICK_NS = 250_000_000
BEFORE, AFTER = 40, 8
PLACES = [CodePlace(Role.UNKNOWN, ""), CodePlace(Role.CODE, "step train.py:8")]


def process(cpu: float, ready: float = 0.0) -> ProcessMoment:
    rows = [Wait(VICTIM, "preempted", "", ready_ns=int(ready * TICK_NS))]
    used = Usage(int(cpu * TICK_NS), int(ready * TICK_NS))
    return ProcessMoment(used, rows, [Place(VICTIM, "", 1, cpu * TICK_NS)])


def offender(moments: list[dict[int, float]], who: dict[int, Who]) -> Offender | None:
    """Of a victim that lacks a CPU from the tick BEFORE on. `moments`: CPUs of the others."""
    made = []
    for number, others in enumerate(moments):
        lacks = number >= BEFORE
        its = {VICTIM: process(0.5, 0.4) if lacks else process(0.9)}
        its |= {pid: process(cpu) for pid, cpu in others.items()}
        made.append(Moment(number * TICK_NS, (number + 1) * TICK_NS, its))
    known = {VICTIM: Who(VICTIM, "train", 1, "job 1"), **who}
    facts = [
        Facts(time_ns=number * TICK_NS, cpus=2, cpus_allowed=2, allowed=[0, 1], state="R")
        for number in (BEFORE, len(moments))
    ]
    window = Window(VICTIM, 2, made[:BEFORE], made[BEFORE:], known, PLACES, facts)
    found = explain(window, is_last_look=True)
    assert found is not None
    assert found.cause == FaultCause.CPU_CONTENTION
    return found.candidates[0].offender


def spread(owner: str, parent: int, number: int) -> tuple[dict[int, float], dict[int, Who]]:
    """Twelve processes in each tick that use a tenth of a CPU each."""
    pids = range(1000 + 12 * number, 1012 + 12 * number)
    return dict.fromkeys(pids, 0.1), {pid: Who(pid, "short", parent, owner) for pid in pids}


def test_who_started_many_short_ones_is_named_and_not_a_neighbour_that_became_busier() -> None:
    who = {
        NEIGHBOUR: Who(NEIGHBOUR, "neighbour", 1, "job 7"),
        SPAWNER: Who(SPAWNER, "spawner", 1, "job 9"),
    }
    moments: list[dict[int, float]] = [{NEIGHBOUR: 0.1, SPAWNER: 0.01} for _ in range(BEFORE)]
    for number in range(AFTER):
        short, names = spread("job 9", SPAWNER, number)
        who |= names
        moments.append({NEIGHBOUR: 0.5, SPAWNER: 0.01, **short})
    found = offender(moments, who)
    assert found is not None
    assert (found.pid, found.name, found.owner) == (SPAWNER, "spawner", "job 9")
    assert "processes that spawner (150) started used 1.2" in found.evidence


def test_those_that_nobody_started_any_more_are_their_owners() -> None:
    who = {NEIGHBOUR: Who(NEIGHBOUR, "neighbour", 1, "job 7")}
    moments: list[dict[int, float]] = [{NEIGHBOUR: 0.1} for _ in range(BEFORE)]
    for number in range(AFTER):
        short, names = spread("job 9", 1, number)
        who |= names
        moments.append({NEIGHBOUR: 0.5, **short})
    found = offender(moments, who)
    assert found is not None
    assert (found.name, found.owner) == ("short", "job 9")
    assert "processes of job 9, short (" in found.evidence


def test_a_build_that_goes_on_as_before_did_not_come_with_its_new_compilers() -> None:
    who = {
        NEIGHBOUR: Who(NEIGHBOUR, "neighbour", 1, "job 7"),
        MAKE: Who(MAKE, "make", 1, "job 9"),
    }
    moments: list[dict[int, float]] = []
    for number in range(BEFORE + AFTER):
        short, names = spread("job 9", MAKE, number)
        who |= names
        moments.append({NEIGHBOUR: 0.1 if number < BEFORE else 0.5, MAKE: 0.01, **short})
    found = offender(moments, who)
    assert found is not None
    assert found.pid == NEIGHBOUR


def test_who_comes_in_another_s_place_is_named_with_what_is_more() -> None:
    who = {pid: Who(pid, "build", SPAWNER, "job 9") for pid in (400, 401)}
    who[SPAWNER] = Who(SPAWNER, "bash", 1, "job 9")
    moments: list[dict[int, float]] = [{SPAWNER: 0.0, 400: 0.4} for _ in range(BEFORE)]
    moments += [{SPAWNER: 0.0, 401: 0.9} for _ in range(AFTER)]
    found = offender(moments, who)
    assert found is not None
    assert (found.pid, found.evidence) == (401, "used 0.50 CPUs more since then")


def test_other_victims_of_the_same_owner_do_not_hide_who_came() -> None:
    draw = random.Random(3)
    others = range(300, 306)
    who = {pid: Who(pid, "worker", 1, "job 7") for pid in (NEIGHBOUR, *others)}
    who[NEIGHBOUR] = Who(NEIGHBOUR, "burner", 1, "job 7")
    moments: list[dict[int, float]] = []
    for number in range(BEFORE + AFTER):
        lacks = number >= BEFORE
        use = {pid: (0.1 if lacks else 0.3) + draw.uniform(0, 0.01) for pid in others}
        moments.append(use | ({NEIGHBOUR: 1.0} if lacks else {}))
    found = offender(moments, who)
    assert found is not None
    assert found.pid == NEIGHBOUR


def test_one_of_four_that_do_the_same_is_named() -> None:
    who = {pid: Who(pid, "burner", SPAWNER, "job 9") for pid in range(400, 404)}
    who[SPAWNER] = Who(SPAWNER, "bash", 1, "job 9")
    moments: list[dict[int, float]] = [{SPAWNER: 0.0} for _ in range(BEFORE)]
    moments += [dict.fromkeys(range(400, 404), 0.4) for _ in range(AFTER)]
    found = offender(moments, who)
    assert found is not None
    assert found.pid in range(400, 404)
    assert abs(found.share - 0.25) < 0.01


def test_what_started_the_victim_too_is_not_named() -> None:
    launcher = 99
    who = {pid: Who(pid, "burner", launcher, "job 1") for pid in range(400, 408)}
    who[launcher] = Who(launcher, "launch.sh", 1, "job 1")
    who[VICTIM] = Who(VICTIM, "train", launcher, "job 1")
    moments: list[dict[int, float]] = [{launcher: 0.0} for _ in range(BEFORE)]
    moments += [dict.fromkeys(range(400, 408), 0.15) for _ in range(AFTER)]
    found = offender(moments, who)
    assert found is not None
    assert found.pid in range(400, 408)


def pinned(own: float, other: float, cpus_before: int = 3) -> FaultCause:
    """The cause for a victim on 3 of 16 CPUs that lacks one, whose two workers use `own` CPUs more
    each, and somebody else `other`."""
    workers = (101, 102)
    made = []
    for number in range(BEFORE + AFTER):
        lacks = number >= BEFORE
        its = {VICTIM: process(0.6, 0.4) if lacks else process(0.9)}
        its |= {pid: process(0.3 + own * lacks) for pid in workers}
        its[NEIGHBOUR] = process(0.1 + other * lacks)
        made.append(Moment(number * TICK_NS, (number + 1) * TICK_NS, its))
    who = {pid: Who(pid, "worker", VICTIM) for pid in workers}
    who |= {VICTIM: Who(VICTIM, "train", 1), NEIGHBOUR: Who(NEIGHBOUR, "neighbour", 1, "job 7")}
    busy = {cpu: 1.0 if cpu < 3 else 0.1 for cpu in range(16)}
    facts = [
        Facts(time_ns=at * TICK_NS, cpus=16, cpus_allowed=3, allowed=[0, 1, 2], state="R",
              cpu_busy=busy, cpus_before=cpus_before)
        for at in (BEFORE, BEFORE + AFTER)
    ]  # fmt: skip
    window = Window(VICTIM, 16, made[:BEFORE], made[BEFORE:], who, PLACES, facts)
    found = explain(window, is_last_look=True)
    assert found is not None
    return found.cause


def test_workers_that_do_more_on_the_same_cpus_are_the_cause() -> None:
    assert pinned(own=0.6, other=0.0) == FaultCause.SLOW_LOADER


def test_workers_that_do_as_before_are_not() -> None:
    assert pinned(own=0.0, other=0.0) == FaultCause.BAD_PINNING


def test_nor_where_it_may_use_fewer_cpus_than_before() -> None:
    assert pinned(own=0.6, other=0.0, cpus_before=16) == FaultCause.BAD_PINNING


def test_nor_where_somebody_else_came_to_its_cpus() -> None:
    assert pinned(own=0.2, other=1.2) == FaultCause.CPU_CONTENTION
