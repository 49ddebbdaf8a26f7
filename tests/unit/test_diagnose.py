# SPDX-License-Identifier: Apache-2.0
"""Detection and explanation on rows made up here: what is noticed, what is not, what is named."""

from __future__ import annotations

import msgspec
import pytest

from sonde.diagnose.detector import Detector
from sonde.diagnose.explain import explain
from sonde.diagnose.incident import Change, FaultCause
from sonde.diagnose.moments import (
    CodePlace,
    DiskUse,
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
from sonde.diagnose.series import Series
from sonde.diagnose.thread_time import Part, side

VICTIM, OTHER, SERVER, CHILD, KERNEL = 100, 200, 300, 101, 7
TICK_NS = 250_000_000
TICKS = 40
PLACES = [
    CodePlace(Role.UNKNOWN, ""),
    CodePlace(Role.CODE, "step train.py:8"),
    CodePlace(Role.GARBAGE, "step train.py:8"),
    CodePlace(Role.INTERPRETER_LOCK, "step train.py:8"),
]


def process(cpu=0.9, ready=0.0, waits=(), place=1, disk=(), usage=None) -> ProcessMoment:
    """One tick of a process: shares of the tick."""
    used = Usage(int(cpu * TICK_NS), int(ready * TICK_NS), **(usage or {}))
    rows = [Wait(VICTIM, "preempted", "", ready_ns=int(ready * TICK_NS)), *waits]
    return ProcessMoment(used, rows, [Place(VICTIM, "", place, cpu * TICK_NS)], list(disk))


def wait(reason, share, waker=0, count=5, tid=VICTIM) -> Wait:
    return Wait(tid, reason, "", count, int(share * TICK_NS), 0, 0, waker, waker)


def moment(number: int, **processes: ProcessMoment) -> Moment:
    found = {int(name[1:]): one for name, one in processes.items()}
    return Moment(number * TICK_NS, (number + 1) * TICK_NS, found)


def usual(number: int) -> Moment:
    return moment(number, p100=process(), p200=process(0.1), p300=process(0.0))


def window(after: list[Moment], before: list[Moment] | None = None, **facts) -> Window:
    who = {
        VICTIM: Who(VICTIM, "train", 1),
        OTHER: Who(OTHER, "neighbour", 1, "job 7"),
        SERVER: Who(SERVER, "server", 1),
        CHILD: Who(CHILD, "worker", VICTIM),
        KERNEL: Who(KERNEL, "kworker", 2, is_kernel=True),
    }
    changes = {"cpus": 2, "cpus_allowed": 2, "allowed": [0, 1], "state": "R", **facts}
    first = Facts(time_ns=TICKS * TICK_NS, cpus=2, cpus_allowed=2, allowed=[0, 1])
    last = Facts(time_ns=(TICKS + 4) * TICK_NS, **changes)
    before = before or [usual(number) for number in range(TICKS)]
    return Window(VICTIM, 2, before, after, who, PLACES, [first, last])


def ticks(count=4, **processes: ProcessMoment) -> list[Moment]:
    return [moment(TICKS + number, **processes) for number in range(count)]


def verdict(*arguments, **facts):
    found = explain(window(*arguments, **facts), is_last_look=True)
    assert found is not None
    return found


def noticed(moments: list[Moment]) -> list:
    detector = Detector()
    found = []
    for one in moments:
        found += detector.add(one, PLACES, {KERNEL})
    return found


def test_a_process_that_lacks_a_cpu_is_noticed_after_two_ticks():
    slow = process(0.5, 0.4)
    (found,) = noticed([usual(n) for n in range(TICKS)] + ticks(2, p100=slow))
    assert (found.pid, found.series) == (VICTIM, (Series.READY,))
    assert found.began_ns == TICKS * TICK_NS


def test_one_odd_tick_is_not_noticed():
    blip = ticks(1, p100=process(0.7, 0.2))
    assert noticed([usual(n) for n in range(TICKS)] + blip + [usual(TICKS + 1)]) == []


def test_a_process_without_a_past_is_no_victim():
    assert noticed(ticks(4, p100=process(0.5, 0.4))) == []


def test_what_always_was_so_is_not_noticed():
    assert noticed([moment(n, p100=process(0.5, 0.4)) for n in range(TICKS)]) == []


def test_less_to_do_is_not_noticed():
    busy = process(0.4, waits=[wait("socket", 0.6, count=20)])
    idle = process(0.1, waits=[wait("socket", 0.9, count=5)])
    before = [moment(n, p100=busy) for n in range(TICKS)]
    found = verdict(ticks(p100=idle), before)
    assert found.change in (Change.PASSED, Change.LOAD)


def test_contention_names_the_process_that_took_the_cpu():
    found = verdict(ticks(p100=process(0.5, 0.4), p200=process(0.9)))
    assert (found.cause, found.change) == (FaultCause.CPU_CONTENTION, None)
    offender = found.candidates[0].offender
    assert offender is not None
    assert (offender.pid, offender.owner) == (OTHER, "job 7")


def test_nobody_is_named_whose_use_did_not_rise():
    found = verdict(ticks(p100=process(0.5, 0.4), p200=process(0.1)))
    assert all(candidate.offender is None for candidate in found.candidates)


def test_a_quota_is_distinguished_from_contention_by_throttled_time():
    slow = ticks(p100=process(0.5, 0.4), p200=process(0.4))
    found = verdict(slow, quota=0.5, throttled_s=0.4, throttled_periods=8)
    assert found.cause == FaultCause.CPU_QUOTA


def test_pinning_is_distinguished_from_contention_by_idle_cpus():
    slow = ticks(p100=process(0.5, 0.4), p200=process(0.9))
    found = verdict(slow, cpus_allowed=1, allowed=[0], cpu_busy={0: 1.0, 1: 0.1})
    assert found.cause == FaultCause.BAD_PINNING


def test_pinning_is_distinguished_from_contention_by_the_cpus_it_had_before():
    one = window(ticks(p100=process(0.5, 0.4), p200=process(0.9)), cpus_allowed=1, allowed=[0])
    one.facts[0].cpus_before = 2
    found = explain(one, is_last_look=True)
    assert found is not None
    assert found.cause == FaultCause.BAD_PINNING


CROWDED = {"cpus": 4, "cpus_allowed": 1, "allowed": [0], "cpu_busy": {0: 1.0, 1: 0.1, 2: 0.0}}


@pytest.mark.parametrize(
    ("before", "others", "busy", "cause"),
    [
        (1, 0.5, 1.0, FaultCause.CPU_CONTENTION),  # somebody came to the CPU it always had
        (0, 0.5, 1.0, FaultCause.BAD_PINNING),  # not known what it had
        (2, 0.5, 1.0, FaultCause.BAD_PINNING),  # its CPUs became fewer
        (1, 0.1, 1.0, FaultCause.BAD_PINNING),  # nobody came
        (1, 0.9, 0.6, FaultCause.BAD_PINNING),  # somebody came, elsewhere
    ],
)
def test_who_comes_to_the_cpus_of_a_pinned_process_is_what_changed(before, others, busy, cause):
    slow = ticks(p100=process(0.5, 0.4), p200=process(others))
    facts = CROWDED | {"cpu_busy": CROWDED["cpu_busy"] | {0: busy}}
    one = window(slow, **facts)
    one.facts[0].cpus_before = before
    found = explain(one, is_last_look=True)
    assert found is not None
    assert found.cause == cause
    if cause == FaultCause.CPU_CONTENTION:
        offender = found.candidates[0].offender
        assert offender is not None and offender.pid == OTHER
        assert "1 of 4 CPUs, as before; 1.90 of the others" in " ".join(
            found.candidates[0].evidence
        )


@pytest.mark.parametrize(
    ("state", "frozen"), [("T", False), ("S", True)], ids=["signal", "control group"]
)
def test_a_frozen_process(state, frozen):
    slow = ticks(p100=process(0.0, waits=[wait("stopped", 1.0, count=0)]))
    assert verdict(slow, state=state, is_frozen=frozen).cause == FaultCause.FROZEN


def on_disk(reason="read", share=0.5, ns=0.5, **usage):
    use = DiskUse("vda", "read", 5, int(ns * TICK_NS), 0, 1 << 20)
    return process(0.4, waits=[wait(reason, share)], disk=[use], usage=usage)


def test_a_limit_on_a_device_is_distinguished_from_others_on_it():
    limits = ["read_bps 254:0 1048576"]
    slow = ticks(p100=on_disk(ns=0.01))
    assert verdict(slow, disk_limits=limits).cause == FaultCause.DISK_THROTTLE


def test_others_on_a_device():
    neighbour = process(0.1, disk=[DiskUse("vda", "write", 50, TICK_NS, 0, 50 << 20)])
    found = verdict(ticks(p100=on_disk(), p200=neighbour))
    assert found.cause == FaultCause.DISK_CONTENTION
    offender = found.candidates[0].offender
    assert offender is not None
    assert offender.pid == OTHER


def test_a_memory_limit_that_is_run_into():
    found = verdict(ticks(p100=on_disk(major_faults=50)), memory_limit_hits=500)
    assert found.cause == FaultCause.RECLAIM


def test_fsync_of_its_own():
    slow = process(0.4, waits=[wait("sync to disk", 0.5)], usage={"written_bytes": 4096})
    assert verdict(ticks(p100=slow)).cause == FaultCause.FSYNC


def test_files_that_a_process_serves():
    slow = process(0.4, waits=[wait("read", 0.5, SERVER)])
    found = verdict(ticks(p100=slow), file_servers=[SERVER])
    assert found.cause == FaultCause.SLOW_FILE_SYSTEM
    offender = found.candidates[0].offender
    assert offender is not None
    assert offender.pid == SERVER


def test_a_worker_that_hands_over_late():
    slow = process(0.4, waits=[wait("read", 0.5, CHILD)])
    found = verdict(ticks(p100=slow, p101=process(0.9)))
    assert found.cause == FaultCause.SLOW_LOADER


def test_the_garbage_collector():
    found = verdict(ticks(p100=process(0.9, place=2)))
    assert found.cause == FaultCause.GARBAGE_COLLECTION


def test_the_interpreters_lock_is_distinguished_from_other_locks_by_stacks():
    holder = wait("futex", 0.5, VICTIM)
    own = process(0.4, waits=[holder])
    interpreter = msgspec.json.decode(msgspec.json.encode(own), type=ProcessMoment)
    interpreter.places.append(Place(VICTIM, "futex", 3, 0.5 * TICK_NS))
    assert verdict(ticks(p100=own)).cause == FaultCause.LOCK
    assert verdict(ticks(p100=interpreter)).cause == FaultCause.INTERPRETER_LOCK


def test_time_in_the_interpreters_lock_is_taken_from_waits_once():
    one = process(0.2, waits=[wait("futex", 0.3, VICTIM), wait("futex", 0.3, OTHER)])
    one.places.append(Place(VICTIM, "futex", 3, 0.4 * TICK_NS))

    times = side(window([]), [moment(0, p100=one)]).times[VICTIM]

    assert times[Part.INTERPRETER_LOCK] == pytest.approx(0.4, abs=0.01)
    assert times[Part.LOCK] == pytest.approx(0.2, abs=0.01)


def test_a_service_that_answers_late():
    slow = process(0.4, waits=[wait("socket", 0.5)])
    found = verdict(ticks(p100=slow), peers={"10.0.0.2:80": "established"})
    assert found.cause == FaultCause.REMOTE_DEPENDENCY


@pytest.mark.parametrize(
    ("pid", "peer", "cause"),
    [
        (VICTIM, "10.0.0.2:80", FaultCause.SLOW_NETWORK),
        (SERVER, "10.0.0.1:80", FaultCause.SLOW_NETWORK),  # the other end, on this node, too
        (OTHER, "10.0.0.9:9000", FaultCause.REMOTE_DEPENDENCY),
    ],
)
def test_segments_that_others_send_again_are_no_fault_of_a_program_s_path(pid, peer, cause):
    slow = ticks(
        p100=process(0.4, waits=[wait("socket", 0.5)]), p200=process(0.1), p300=process(0.1)
    )
    for one in slow:
        one.processes[VICTIM].flows.append(FlowUse("10.0.0.2:80", "send", 10))
        one.processes[pid].flows.append(FlowUse(peer, "retransmit", 5))

    before = [usual(number) for number in range(TICKS)]
    before[0].processes[VICTIM].flows.append(FlowUse("10.0.0.2:80", "send", 10))

    found = verdict(slow, before, peers={"10.0.0.2:80": "established"})

    assert found.cause == cause


def test_a_server_whose_backend_is_slow_is_distinguished_from_one_that_is_asked_less():
    def serving(asked, idle):
        one = process(0.3, waits=[wait("socket", asked + idle, count=20)])
        one.places += [Place(VICTIM, "socket", 1, idle * TICK_NS)]
        one.places += [Place(VICTIM, "socket", 2, asked * TICK_NS)]
        return one

    before = [moment(n, p100=serving(0.05, 0.65)) for n in range(TICKS)]
    facts = {"peers": {"10.0.0.2:80": "established"}, "listens": True}
    slow = ticks(p100=serving(0.5, 0.2))
    assert verdict(slow, before, **facts).cause == FaultCause.REMOTE_DEPENDENCY
    assert [it.series for it in noticed(before + slow[:2])] == [(Series.ASKED,)]
    less = ticks(p100=serving(0.02, 0.9))
    assert verdict(less, before, **facts).change in (Change.LOAD, Change.PASSED)
    assert noticed(before + less) == []


def test_a_worker_that_lacks_a_cpu_is_no_slow_loader():
    slow = process(0.4, waits=[wait("read", 0.5, CHILD)])
    starved = ProcessMoment(
        Usage(int(0.4 * TICK_NS)), [Wait(CHILD, "preempted", "", 0, 0, int(0.5 * TICK_NS))]
    )
    worked = ProcessMoment(Usage(int(0.9 * TICK_NS)), [], [Place(CHILD, "", 1, 0.9 * TICK_NS)])
    before = [moment(n, p100=process(), p101=worked) for n in range(TICKS)]
    found = verdict(ticks(p100=slow, p101=starved), before)
    assert found.cause != FaultCause.SLOW_LOADER
    (loader,) = (it for it in found.candidates if it.cause == FaultCause.SLOW_LOADER)
    assert [it for it in loader.against if "lacked a CPU for 0.50 s more" in it]


@pytest.mark.parametrize(
    ("stopped", "text"), [(0.0, "too little"), (0.6, "was stopped for 0.60 s")]
)
def test_what_counts_against_a_slow_loader_is_what_its_worker_did(stopped, text):
    """One that was stopped, or did what it did before, lacked no CPU."""
    slow = process(0.4, waits=[wait("read", 0.5, CHILD)])
    worked = ProcessMoment(Usage(int(0.9 * TICK_NS)), [], [Place(CHILD, "", 1, 0.9 * TICK_NS)])
    cpu = int((0.9 - stopped) * TICK_NS)
    held_up = wait("stopped", stopped, count=0, tid=CHILD)
    worker = ProcessMoment(Usage(cpu), [held_up], [Place(CHILD, "", 1, cpu)])
    before = [moment(n, p100=process(), p101=worked) for n in range(TICKS)]

    found = verdict(ticks(p100=slow, p101=worker), before)

    (loader,) = (it for it in found.candidates if it.cause == FaultCause.SLOW_LOADER)
    assert text in " ".join(loader.against)
    assert "lacked a CPU" not in " ".join(loader.against)


def test_what_is_over_is_not_reported():
    slow = ticks(3, p100=process(0.5, 0.4), p200=process(0.9))
    over = [moment(TICKS + 3 + n, p100=process(), p200=process(0.1)) for n in range(3)]
    assert verdict(slow + over).change == Change.PASSED


def test_a_small_slowdown_without_a_cause_is_not_reported():
    slow = ticks(p100=process(0.8, waits=[wait("driver", 0.08)]))
    assert verdict(slow).change == Change.PASSED


def test_a_large_one_is_unknown():
    found = verdict(ticks(p100=process(0.3, waits=[wait("driver", 0.6)])))
    assert (found.cause, found.change) == (FaultCause.UNKNOWN, None)


def test_more_work_is_no_fault():
    light = process(0.3, waits=[wait("socket", 0.5, count=10)])
    heavy = process(0.7, 0.1, waits=[wait("socket", 0.1, count=25)])
    found = verdict(ticks(p100=heavy), [moment(n, p100=light) for n in range(TICKS)])
    assert found.change == Change.LOAD


def test_a_window_comes_back_from_json():
    one = window(ticks(p100=process(0.5, 0.4)))
    assert msgspec.json.decode(msgspec.json.encode(one), type=Window) == one


def test_a_service_on_this_node_is_named_and_no_path_is_to_blame():
    """Segments are sent again on the loopback interface, too, where the receiver is short of a CPU
    or memory."""
    answers = process(0.2, waits=[wait("sync to disk", 0.4, count=100)])
    slow = ticks(p100=process(0.4, waits=[wait("socket", 0.5)]), p300=answers)
    before = [usual(number) for number in range(TICKS)]
    for one in (*before, *slow):
        one.processes[VICTIM].flows.append(FlowUse("127.0.0.1:9301", "send", 10))
    for one in slow:
        one.processes[VICTIM].flows.append(FlowUse("127.0.0.1:9301", "retransmit", 5))
    peers = {"127.0.0.1:9301": "established"}

    found = verdict(slow, before, peers=peers, holders={"127.0.0.1:9301": SERVER})

    assert found.cause == FaultCause.REMOTE_DEPENDENCY
    assert FaultCause.SLOW_NETWORK not in {it.cause for it in found.candidates}
    assert any(f"({SERVER}) at 127.0.0.1:9301" in line for line in found.candidates[0].evidence)
    assert any("0.40 s in syncs to disk" in line for line in found.candidates[0].evidence)
    assert found.candidates[0].next_step.endswith(f"sonde explain --pid {SERVER}.")
    assert not found.candidates[0].against
