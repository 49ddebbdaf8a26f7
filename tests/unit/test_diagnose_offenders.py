# SPDX-License-Identifier: Apache-2.0
"""Who took a disk or a device: also where that one spreads its work over many processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_diagnose import CROWDED, on_disk, process, wait
from test_diagnose import window as cpu_window
from test_diagnose_devices import GB, GPU, SLOW, other, program

from sonde.diagnose import offenders
from sonde.diagnose.explain import explain
from sonde.diagnose.incident import Candidate, Change, FaultCause, Verdict
from sonde.diagnose.moments import (
    CodePlace,
    DeviceUse,
    DiskUse,
    Facts,
    Moment,
    ProcessMoment,
    Role,
    Usage,
    Who,
    Window,
)
from sonde.diagnose.recorded import shrunk

VICTIM, SPAWNER, NEIGHBOUR, FELLOW = 100, 150, 200, 250
TICK_NS = 250_000_000
BEFORE, AFTER = 40, 8
MB = 1 << 20
PLACES = [CodePlace(Role.UNKNOWN, ""), CodePlace(Role.CODE, "step train.py:8")]

Tick = dict[int, ProcessMoment]


def many(number: int, is_short: bool) -> range:
    """The pids of twenty processes, others in each tick where they are short."""
    return range(1000, 1020) if not is_short else range(1000 + 20 * number, 1020 + 20 * number)


def names(parent: int, owner: str = "job 9") -> dict[int, Who]:
    pids = range(1000, 1020 + 20 * (BEFORE + AFTER))
    return {pid: Who(pid, "short", parent, owner) for pid in pids} | {
        VICTIM: Who(VICTIM, "train", 1, "job 1"),
        SPAWNER: Who(SPAWNER, "spawner", 1, owner),
        NEIGHBOUR: Who(NEIGHBOUR, "neighbour", 1, "job 7"),
        FELLOW: Who(FELLOW, "fellow", 1, "job 8"),
    }


def made(ticks: list[Tick], who: dict[int, Who]) -> Window:
    """A window in which the victim is slower from the tick BEFORE on."""
    moments = [Moment(n * TICK_NS, (n + 1) * TICK_NS, its) for n, its in enumerate(ticks)]
    facts = [
        Facts(time_ns=at * TICK_NS, cpus=2, cpus_allowed=2, allowed=[0, 1], state="R")
        for at in (BEFORE, len(ticks))
    ]
    return Window(VICTIM, 2, moments[:BEFORE], moments[BEFORE:], who, PLACES, facts)


def verdict(window: Window) -> Verdict:
    found = explain(window, is_last_look=True)
    assert found is not None
    return found


def first(window: Window, cause: FaultCause) -> Candidate:
    found = verdict(window)
    assert found.cause == cause
    return found.candidates[0]


def writer(mb: float, requests: int = 8, seconds: float = 0.0) -> ProcessMoment:
    """One that moves this many MB a second; `seconds`: of its requests, in each second."""
    use = DiskUse("vda", "write", requests, int(seconds * TICK_NS), 0, int(mb * MB / 4))
    return ProcessMoment(Usage(TICK_NS // 100), disk=[use])


def disk_ticks() -> Iterator[tuple[int, bool, Tick]]:
    """(number, whether the victim is slower, its part) of each tick."""
    for number in range(BEFORE + AFTER):
        is_slow = number >= BEFORE
        its = on_disk() if is_slow else process(0.85, waits=[wait("read", 0.05)])
        if not is_slow:
            its.disk = [DiskUse("vda", "read", 5, TICK_NS // 200, 0, MB)]
        yield number, is_slow, {VICTIM: its}


def on_same_disk(is_short: bool, mb: float, neighbour_mb: float) -> list[Tick]:
    """Twenty that write `mb` a second together come, and a neighbour writes `neighbour_mb`."""
    ticks = []
    for number, is_slow, tick in disk_ticks():
        tick |= {SPAWNER: writer(0.0), NEIGHBOUR: writer(neighbour_mb if is_slow else 0.0)}
        if is_slow:
            tick |= {pid: writer(mb / 20) for pid in many(number, is_short)}
        ticks.append(tick)
    return ticks


@pytest.mark.parametrize("is_short", [False, True], ids=["twenty", "short ones"])
def test_who_spreads_its_writes_is_named_and_not_a_neighbour_that_writes_a_third(is_short):
    found = first(made(on_same_disk(is_short, 21, 7), names(SPAWNER)), FaultCause.DISK_CONTENTION)
    assert found.offender is not None
    assert (found.offender.pid, found.offender.owner) == (SPAWNER, "job 9")
    count = 20 * AFTER if is_short else 20
    assert (
        f"{count} processes that spawner (150) started moved 22.0 MB/s" in found.offender.evidence
    )
    assert found.offender.share == pytest.approx(0.75, abs=0.01)
    assert any("spawner (150) started moved 22.0 MB/s more tog" in it for it in found.evidence)


def test_writers_that_nobody_started_any_more_are_their_owners():
    found = first(made(on_same_disk(True, 21, 7), names(1)), FaultCause.DISK_CONTENTION)
    assert found.offender is not None
    assert (found.offender.name, found.offender.owner) == ("short", "job 9")
    assert "processes of job 9, short (" in found.offender.evidence


def test_writers_that_came_one_for_another_did_not_come_with_the_slowdown():
    ticks = []
    for number, is_slow, tick in disk_ticks():
        tick |= {pid: writer(1.0) for pid in many(number, is_short=True)}
        ticks.append(tick | {NEIGHBOUR: writer(7.0 if is_slow else 0.0)})
    found = first(made(ticks, names(SPAWNER)), FaultCause.DISK_CONTENTION)
    assert found.offender is not None
    assert found.offender.pid == NEIGHBOUR


@pytest.mark.parametrize(("before", "more"), [(20.0, ""), (19.0, ""), (14.0, "6.3 MB/s and")])
def test_who_goes_on_where_another_of_the_same_ended_came_with_what_it_moves_more(before, more):
    ticks = []
    for _, is_slow, tick in disk_ticks():
        ticks.append(tick | ({1001: writer(20.0)} if is_slow else {1000: writer(before)}))
    found = verdict(made(ticks, names(SPAWNER)))
    named = [it.offender for it in found.candidates if it.offender is not None]
    assert [it.pid for it in named] == ([1001] if more else [])
    assert [it.evidence[: len(more)] for it in named] == [more] * len(named)


def test_many_that_move_little_together_are_not_named_nor_one_that_moves_less():
    found = first(made(on_same_disk(True, 5, 3), names(SPAWNER)), FaultCause.DISK_CONTENTION)
    assert found.offender is None


def test_requests_that_take_longer_and_are_no_more_are_no_offence():
    """Whose requests take longer suffers like the victim."""
    ticks = []
    for _, is_slow, tick in disk_ticks():
        fellow = writer(1.0, 8, 0.5 if is_slow else 0.05)
        ticks.append(tick | {FELLOW: fellow})
    found = verdict(made(ticks, names(SPAWNER)))
    assert FaultCause.DISK_CONTENTION not in {it.cause for it in found.candidates}


def test_many_with_small_requests_are_known_by_their_time():
    ticks = []
    for number, is_slow, tick in disk_ticks():
        tick |= {FELLOW: writer(1.0, 8, 0.5 if is_slow else 0.05)}
        tick |= {NEIGHBOUR: writer(0.1, 8, 0.2) if is_slow else writer(0.0, 0)}
        if is_slow:
            tick |= {pid: writer(0.05, 50, 0.03) for pid in many(number, is_short=True)}
        ticks.append(tick)
    found = first(made(ticks, names(SPAWNER)), FaultCause.DISK_CONTENTION)
    assert found.offender is not None
    assert found.offender.pid == SPAWNER
    assert "0.60 s of requests a second more together" in found.offender.evidence


def device_ticks(is_slow_victim: dict[str, object] | None = None, **use: float) -> list[Tick]:
    """The victim's part of each tick. `use`: what it does all the time."""
    found = []
    for number in range(BEFORE + AFTER):
        at = (number + 1) * TICK_NS
        slow = {**SLOW, **(is_slow_victim or {})} if number >= BEFORE else {}
        found.append({VICTIM: program(at=at, **(use | slow))})
    return found


def device_window(ticks: list[Tick], who: dict[int, Who], **use: float) -> Window:
    window = made(ticks, who)
    values = {"memory_used": 20.0 * GB, "memory_total": 80.0 * GB, "dram_active": 0.3, **use}
    for one in (*window.before, *window.after):
        one.devices = [DeviceUse(GPU, one.end_ns, **values)]
    return window


def on_same_device(
    ticks: list[Tick], is_short: bool, each: dict[str, float], neighbour: dict[str, float]
) -> list[Tick]:
    """Twenty that use a device come, and a neighbour uses more of it."""
    for number, tick in enumerate(ticks):
        at = (number + 1) * TICK_NS
        is_slow = number >= BEFORE
        tick[NEIGHBOUR] = other(at=at, **(neighbour if is_slow else {}))
        tick[SPAWNER] = ProcessMoment(Usage(TICK_NS // 100))
        if is_slow:
            tick |= {pid: other(at=at, **each) for pid in many(number, is_short)}
    return ticks


DEVICE_USE = {
    "busy": (
        *({"busy": 0.03, "held": 0.1}, {"busy": 0.2}, {}, {}, {}),
        *(FaultCause.DEVICE_CONTENTION, "used 60% of the device more together"),
    ),
    "copies": (
        *({"copied": 50 * MB}, {"copied": 330 * MB}, {"mb": 64}, {"mb": 64}, {}),
        *(FaultCause.PCIE_CONTENTION, "copied 4.2 GB/s more together"),
    ),
    "memory": (
        *({"held": 1.2}, {"held": 9.0}, {}, {"steps": 8, "memory": (4, 0.15)}),
        {"memory_used": 79.0 * GB},
        *(FaultCause.DEVICE_MEMORY, "took 25.8 GB of the device's memory together"),
    ),
}
"""What each of twenty does, a neighbour, the victim, it in slow steps, its device, cause, text."""


@pytest.mark.parametrize("is_short", [False, True], ids=["twenty", "short ones"])
@pytest.mark.parametrize("what", DEVICE_USE)
def test_who_spreads_its_use_of_a_device_is_named_and_not_a_neighbour(what, is_short):
    each, neighbour, usual, slow, device, cause, text = DEVICE_USE[what]
    ticks = on_same_device(device_ticks(slow, **usual), is_short, each, neighbour)
    found = first(device_window(ticks, names(SPAWNER), **device), cause)
    assert found.offender is not None
    assert (found.offender.pid, found.offender.owner) == (SPAWNER, "job 9")
    assert text in found.offender.evidence
    assert any("processes that spawner (150) started" in it for it in found.evidence)


@pytest.mark.parametrize("busy", [0.5, 0.0])
def test_who_goes_on_at_a_device_where_another_of_the_same_ended_did_not_come(busy):
    ticks = device_ticks()
    for number, tick in enumerate(ticks):
        pid = 1001 if number >= BEFORE else 1000
        tick[pid] = other(busy=busy if number < BEFORE else 0.5, at=(number + 1) * TICK_NS)
    found = verdict(device_window(ticks, names(SPAWNER)))
    if busy:
        assert found.change == Change.OWN_WORK
    else:
        assert found.cause == FaultCause.DEVICE_CONTENTION


def test_short_ones_that_come_one_for_another_at_a_device_are_not_named():
    ticks = device_ticks()
    for number, tick in enumerate(ticks):
        at = (number + 1) * TICK_NS
        tick |= {pid: other(busy=0.03, at=at) for pid in many(number, is_short=True)}
    assert verdict(device_window(ticks, names(SPAWNER))).change == Change.OWN_WORK


def test_a_recorded_incident_names_who_started_many_though_that_one_did_nothing():
    ticks = on_same_disk(True, 21, 7)
    for tick in ticks:
        del tick[SPAWNER]
    found = first(shrunk(made(ticks, names(SPAWNER))), FaultCause.DISK_CONTENTION)
    assert found.offender is not None
    assert found.offender.pid == SPAWNER


def test_users_of_cpus_are_looked_for_once_a_verdict(monkeypatch):
    calls = []
    real = offenders.users
    monkeypatch.setattr(offenders, "users", lambda *given: calls.append(1) or real(*given))
    slow = [
        Moment(n * TICK_NS, (n + 1) * TICK_NS, {VICTIM: process(0.5, 0.4), 101: process(0.9),
                                                NEIGHBOUR: process(0.9)})
        for n in range(BEFORE, BEFORE + 4)
    ]  # fmt: skip
    window = cpu_window(slow, **CROWDED)
    window.facts[0].cpus_before = 1
    assert explain(window, is_last_look=True) is not None
    assert len(calls) == 1
