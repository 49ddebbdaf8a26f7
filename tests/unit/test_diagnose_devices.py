# SPDX-License-Identifier: Apache-2.0
"""Slowdowns at a device, on rows made up here: what is noticed, what is named, what is no fault."""

from __future__ import annotations

import msgspec
import pytest
from test_diagnose import CHILD, OTHER, TICK_NS, TICKS, VICTIM, moment, noticed, process, window

from sonde.agent.device_moments import MAX_DEVICES, MAX_SHARES, DeviceReader
from sonde.agent.moments import MAX_CALLS, MomentMaker
from sonde.collect.collector import Batch
from sonde.diagnose.explain import explain
from sonde.diagnose.incident import Change, FaultCause
from sonde.diagnose.moments import (
    Call,
    DeviceShare,
    DeviceUse,
    Moment,
    Place,
    ProcessMoment,
    Usage,
    Wait,
)
from sonde.diagnose.recorded import shrunk
from sonde.diagnose.series import Series
from sonde.diagnose.thread_time import Part
from sonde.metrics import labels_of
from sonde.model.rows import Rows

GPU = "GPU-1"
GB = 1 << 30


def program(
    steps=12, sync=0.9, norms=0, build=0.0, memory=(0, 0.0), mb=1.0, busy=0.9, syncs=0, at=0
):
    """A tick of a program that copies to its device, launches and waits in each step."""
    ns = TICK_NS
    reads = steps * (1 + norms)
    calls = [
        Call("cudaMemcpyAsync", steps, 100_000 * steps, "copy", "h2d", int(mb * steps * 2**20)),
        Call("cudaMemcpyAsync", reads, 10_000 * reads, "copy", "d2h", 4 * reads),
        Call("cudaStreamSynchronize", reads, int(sync * ns), "sync"),
    ]
    if build:
        calls.append(Call("nvrtcCompileProgram", 3, int(build * ns), "build"))
    count, seconds = memory
    if count:
        calls.append(Call("cudaMalloc", count, int(seconds * ns), "alloc"))
        calls.append(Call("cudaFree", count, int(seconds * ns), "free"))
    share = DeviceShare(GPU, at, busy, 0.2, 10.0 * GB)
    places = [Place(VICTIM, "", 1, 0.95 * ns)]
    waits = [Wait(VICTIM, "sync to disk", "", syncs, int(0.09 * ns))] if syncs else []
    return ProcessMoment(Usage(int(0.95 * ns)), waits, places, calls=calls, devices=[share])


def other(busy=0.0, held=1.0, copied=0, at=0):
    calls = [Call("cudaMemcpyAsync", 4, 0, "copy", "h2d", copied)] if copied else []
    share = DeviceShare(GPU, at, busy, 0.1, held * GB)
    return ProcessMoment(Usage(TICK_NS // 4), calls=calls, devices=[share])


def tick(number: int, victim=None, beside=None, **use) -> Moment:
    at = (number + 1) * TICK_NS
    victim, beside = dict(victim or {}), dict(beside or {})
    one = moment(number, p100=program(at=at, **victim), p200=other(at=at, **beside))
    values = {"memory_used": 20.0 * GB, "memory_total": 80.0 * GB, "dram_active": 0.3}
    one.devices = [DeviceUse(GPU, at, **(values | use))]
    return one


USUAL = [tick(number) for number in range(TICKS)]


def later(count=8, **what) -> list[Moment]:
    return [tick(TICKS + number, **what) for number in range(count)]


def verdict(after, before=None, **looks):
    found = explain(window(after, before or USUAL), is_last_look=True)
    assert found is not None
    return found


SLOW = {"steps": 6, "sync": 0.95}


def test_steps_that_come_more_slowly_are_noticed():
    (found, *_) = noticed(USUAL + later(2, victim=SLOW))
    assert found.pid == VICTIM
    assert {Series.STEPS, Series.CALLS} & set(found.series)


def test_steps_that_vary_show_nothing():
    def some(number: int, steps: int) -> Moment:
        return tick(number, victim={"steps": steps, "sync": 0.04 * steps})

    before = [some(number, (2, 20)[number % 2]) for number in range(TICKS)]
    assert noticed([*before, some(TICKS, 3), some(TICKS + 1, 3)]) == []


def test_a_co_tenant_whose_use_of_the_device_rose_is_the_offender():
    found = verdict(later(victim=SLOW, beside={"busy": 0.5}))
    assert (found.cause, found.change) == (FaultCause.DEVICE_CONTENTION, None)
    offender = found.candidates[0].offender
    assert offender is not None and offender.pid == OTHER
    assert found.lost[Part.DEVICE] == pytest.approx(0.5, abs=0.1)
    assert found.slowdown == pytest.approx(2.0, abs=0.1)


def test_a_co_tenant_that_fills_the_device_s_memory_bus_is_distinguished():
    found = verdict(later(victim=SLOW, beside={"busy": 0.5}, dram_active=0.8))
    assert found.cause == FaultCause.DRAM_CONTENTION


@pytest.mark.parametrize("beside", [{}, {"busy": 0.0}])
def test_larger_steps_of_its_own_are_no_fault(beside):
    found = verdict(later(victim=SLOW, beside=beside))
    assert found.change == Change.OWN_WORK


def test_a_co_tenant_that_was_always_there_is_not_named():
    before = [tick(number, beside={"busy": 0.5}) for number in range(TICKS)]
    found = verdict(later(victim=SLOW, beside={"busy": 0.5}), before)
    assert found.change == Change.OWN_WORK


def test_what_the_driver_knew_before_the_change_is_no_evidence_of_after():
    after = later(victim=SLOW, beside={"busy": 0.5})
    for one in after:
        for share in one.processes[OTHER].devices:
            share.time_ns = TICKS * TICK_NS - 1
    assert verdict(after).change == Change.OWN_WORK


def test_copies_of_another_process_slow_a_program_that_copies():
    before = [tick(number, victim={"mb": 64}) for number in range(TICKS)]
    slow = {"steps": 6, "sync": 0.95, "mb": 64}
    found = verdict(later(victim=slow, beside={"copied": GB, "busy": 0.1}), before)
    assert found.cause == FaultCause.PCIE_CONTENTION
    offender = found.candidates[0].offender
    assert offender is not None and offender.pid == OTHER


def test_full_memory_makes_the_allocator_give_back_and_take_again():
    slow = {"steps": 8, "memory": (4, 0.15)}
    found = verdict(later(victim=slow, beside={"held": 60.0}, memory_used=79.0 * GB))
    assert found.cause == FaultCause.DEVICE_MEMORY
    offender = found.candidates[0].offender
    assert offender is not None and offender.pid == OTHER


def test_memory_that_is_not_full_is_no_pressure():
    found = verdict(later(victim={"steps": 8, "memory": (4, 0.15)}))
    assert FaultCause.DEVICE_MEMORY not in {it.cause for it in found.candidates}


def test_bytes_over_the_link_that_nobody_copied_are_pages_that_move():
    before = [tick(number, bytes_in=1e8, bytes_out=1e7) for number in range(TICKS)]
    found = verdict(later(victim=SLOW, bytes_in=3e9, bytes_out=3e9), before)
    assert found.cause == FaultCause.PAGE_MIGRATION


def test_more_waits_for_the_device_in_each_step():
    found = verdict(later(victim={"steps": 8, "norms": 30, "sync": 0.6}))
    assert (found.cause, found.change) == (FaultCause.SYNCHRONIZATION, None)


def test_compiling_in_steps():
    found = verdict(later(victim={"steps": 7, "build": 0.4, "sync": 0.5}))
    assert (found.cause, found.change) == (FaultCause.RECOMPILATION, None)


def test_host_faults_are_not_taken_for_the_device():
    after = later(victim={"steps": 6, "sync": 0.95}, beside={})
    for one in after:
        process = one.processes[VICTIM]
        process.usage.cpu_ns = TICK_NS // 2
        process.waits = [Wait(VICTIM, "preempted", "", 5, 0, TICK_NS // 2)]
        one.processes[OTHER].usage.cpu_ns = TICK_NS
    assert verdict(after).cause == FaultCause.CPU_CONTENTION


def test_an_incident_keeps_what_devices_did():
    kept = shrunk(window(later(victim=SLOW, beside={"busy": 0.5, "copied": GB}), USUAL))
    again = msgspec.json.decode(msgspec.json.encode(kept), type=type(kept))
    found = explain(again, is_last_look=True)
    assert found is not None and found.cause == FaultCause.DEVICE_CONTENTION
    assert again.after[0].processes[OTHER].calls[0].bytes == GB


def point(series, value, time_ns=TICK_NS, pid=0, device=GPU, **labels):
    who = {"process.pid": str(pid), "sonde.process.start": "1"} if pid else {}
    return time_ns, series, labels_of({"hw.id": device, **who, **labels}), value


def test_points_become_records_by_the_time_at_which_they_were_read():
    reader = DeviceReader()
    reader.take(
        [
            point("hw.gpu.utilization", 0.2, **{"hw.gpu.task": "general"}),
            point("hw.gpu.utilization", 0.4, **{"hw.gpu.task": "general"}),
            point("hw.gpu.utilization", 0.9, **{"hw.gpu.task": "decoder"}),
            point("hw.gpu.utilization", 1.0, 3 * TICK_NS, **{"hw.gpu.task": "general"}),
            point("sonde.gpu.pcie.throughput", 5e9, **{"network.io.direction": "receive"}),
            point("sonde.gpu.throttled", 1.0, **{"sonde.gpu.throttle.reason": "hardware_thermal"}),
            point("sonde.process.gpu.utilization", 0.7, pid=7, **{"sonde.gpu.engine": "sm"}),
            point("sonde.process.gpu.utilization", 0.1, pid=7, **{"sonde.gpu.engine": "encoder"}),
            point("sonde.process.gpu.memory", 5.0, pid=7),
            point("hw.gpu.memory.usage", float("nan")),
            point("system.cpu.time", 1.0),
        ]
    )
    first, second = (it for it in reader.give()[0])
    assert (first.busy, first.bytes_in, first.memory_used) == (pytest.approx(0.3), 5e9, -1.0)
    assert (second.time_ns, second.busy) == (3 * TICK_NS, 1.0)
    assert second.throttled == ["hardware_thermal"]
    assert reader.give() == ([], [])


def test_shares_of_processes_are_part_of_their_moment():
    rows = [
        point("sonde.process.gpu.utilization", 0.7, pid=7, **{"sonde.gpu.engine": "sm"}),
        point("sonde.process.gpu.memory", 5.0, pid=7),
    ]
    made = MomentMaker(lambda _: (), 1e7).make(0, TICK_NS, [Batch(metrics=rows)])
    (share,) = made.processes[7].devices
    assert (share.device, share.busy, share.memory_bytes) == (GPU, 0.7, 5.0)


def test_devices_and_processes_are_bounded():
    reader = DeviceReader()
    reader.take(
        point("hw.gpu.memory.usage", 1.0, device=f"GPU-{n}") for n in range(MAX_DEVICES + 5)
    )
    assert len(reader.give()[0]) == MAX_DEVICES
    reader.take(
        point("sonde.process.gpu.memory", 1.0, pid=n, device="GPU-0")
        for n in range(1, MAX_SHARES + 9)
    )
    assert len(reader.give()[1]) == MAX_SHARES
    assert reader.left_out == 5 + 8


def test_calls_of_a_thread_are_summed_by_function_and_bounded():
    def row(name, tid, count, ns, size):
        return (0, "device", name, "cuda-runtime", "copy", "h2d", 0, 5, 0, tid, count, ns, size, ns,
                0, 0)  # fmt: skip

    rows = [row("cudaMemcpyAsync", 5, 1, 10, 100), row("cudaMemcpyAsync", 5, 2, 20, 300)]
    rows += [row(f"f{number}", 5, 1, 1, 0) for number in range(MAX_CALLS + 5)]
    maker = MomentMaker(lambda _: (), 1e7)
    calls = maker.make(0, TICK_NS, [Batch(rows=Rows(activity=rows))]).processes[5].calls
    assert len(calls) == MAX_CALLS
    first = calls[0]
    assert (first.count, first.ns, first.bytes, first.op, first.direction, first.tid) == (
        3, 30, 400, "copy", "h2d", 5,
    )  # fmt: skip


def test_a_program_that_begins_to_use_a_device_is_compared_with_nothing_before():
    loads = [moment(number, p100=ProcessMoment(Usage(TICK_NS))) for number in range(TICKS)]
    first = [
        tick(TICKS + number, victim={"steps": 1, "sync": 0.1, "build": 0.8, "memory": (9, 0.2)})
        for number in range(3)
    ]
    steps = [tick(TICKS + 3 + number) for number in range(TICKS)]
    assert noticed(loads + first + steps) == []
    slow = [tick(2 * TICKS + 3 + number, victim=SLOW) for number in range(2)]
    (found, *_) = noticed(loads + first + steps + slow)
    assert found.since_ns >= steps[0].start_ns


def test_a_program_that_waits_for_its_start_begins_again():
    first = later(3)
    idle = [moment(TICKS + 3 + number, p100=ProcessMoment()) for number in range(20)]
    steps = [tick(TICKS + 23 + number) for number in range(TICKS)]
    assert noticed(first + idle + steps) == []


def handed(number: int, steps: int, each: float, waker=102, times=1, **what) -> Moment:
    one = tick(number, victim={"steps": steps, **what})
    mine = one.processes[VICTIM]
    mine.waits = [
        Wait(VICTIM, "futex", "", steps * times, int(each * TICK_NS), 0, 0, VICTIM, waker)
    ]
    return one


def test_threads_that_hand_work_on_wait_for_no_lock():
    before = [handed(number, 12, 0.4) for number in range(TICKS)]
    after = [handed(TICKS + number, 6, 0.7, sync=0.95) for number in range(8)]
    found = verdict(after, before)
    assert found.cause != FaultCause.LOCK
    assert found.lost.get(Part.LOCK, 0.0) == 0.0


@pytest.mark.parametrize(("work", "is_loader"), [(0.7, True), (0.0, False)])
def test_steps_that_wait_for_a_worker_s_results_are_the_loader_s(work, is_loader):
    """The thread that launches waits for one that takes what the worker hands over."""

    def loading(number: int, steps: int, waits: float, own: float) -> Moment:
        one = handed(number, steps, waits, sync=0.2)
        one.processes[VICTIM].waits.append(
            Wait(103, "read", "", steps, int(0.1 * TICK_NS * (12 / steps)), 0, 0, CHILD, CHILD)
        )
        one.processes[CHILD] = process(own)
        return one

    before = [loading(number, 12, 0.1, 0.1) for number in range(TICKS)]
    after = [loading(TICKS + number, 6, 0.6, 0.1 + work) for number in range(8)]
    found = verdict(after, before)
    assert (found.cause == FaultCause.SLOW_LOADER) == is_loader


def test_waits_that_each_step_did_not_have_before_are_for_a_lock():
    before = [handed(number, 12, 0.1) for number in range(TICKS)]
    after = [handed(TICKS + number, 6, 0.6, times=3, sync=0.45) for number in range(8)]
    assert verdict(after, before).cause == FaultCause.LOCK
    after = [handed(TICKS + number, 6, 0.6, waker=103, sync=0.45) for number in range(8)]
    assert verdict(after, before).cause == FaultCause.LOCK


def test_what_takes_a_device_is_named_once_its_counters_are_of_the_time_after():
    after = later(3, victim=SLOW, beside={"busy": 0.5}, dram_active=0.4)
    assert explain(window(after, USUAL), is_last_look=False) is None
    after += later(8, victim=SLOW, beside={"busy": 0.5}, dram_active=0.8)[3:]
    found = explain(window(after, USUAL), is_last_look=False)
    assert found is not None and found.cause == FaultCause.DRAM_CONTENTION


def test_syncs_that_came_with_slower_steps_are_due_for_more_than_their_waits():
    found = verdict(later(victim={"steps": 8, "sync": 0.6, "syncs": 200}))
    assert found.cause == FaultCause.FSYNC
    assert found.candidates[0].share > 0.9


def test_syncs_as_before_are_not():
    few = {"steps": 12, "syncs": 150}
    before = [tick(number, victim=few) for number in range(TICKS)]
    found = verdict(later(victim={"steps": 8, "sync": 0.6, "syncs": 200}), before)
    assert found.cause != FaultCause.FSYNC
