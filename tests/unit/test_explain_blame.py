# SPDX-License-Identifier: Apache-2.0
"""Each stall gets the cause that it has, exactly one, and blame sums to the stalls."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from sonde.analyze.blame import blame_device
from sonde.analyze.bound import explain
from sonde.analyze.causes import CAUSES
from sonde.model.causes import Bound, Cause
from sonde.model.timeline import CallKind, CopyDirection, DeviceKind, Memory, Samples
from timelines import PID, Scene, repeated, shares, used_by_another


def late(what):
    """A step whose kernels are held up for 8 ms by what its thread does meanwhile."""

    def step(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 1000)
        what(scene, t + 1500, t + 9500)

    return step


HOLD_UPS = {
    Cause.STOPPED: lambda s, a, b: s.blocked(a, b, "stopped"),
    Cause.RUN_QUEUE: lambda s, a, b: s.runqueue(a, b),
    Cause.INPUT: lambda s, a, b: s.range(a, b, "enumerate(DataLoader)#_SingleProcess.__next__"),
    Cause.ALLOCATION: lambda s, a, b: s.call(a, b, "cudaMalloc", CallKind.ALLOC),
    Cause.BUILD: lambda s, a, b: s.call(a, b, "cuModuleLoadData", CallKind.BUILD),
    Cause.PAGE_FAULT: lambda s, a, b: s.blocked(a, b, "page fault"),
    Cause.LOCK: lambda s, a, b: s.blocked(a, b, "futex"),
    Cause.IO: lambda s, a, b: s.blocked(a, b, "sync to disk"),
    Cause.SLEEP: lambda s, a, b: s.blocked(a, b, "sleep"),
    Cause.HOST: lambda s, a, b: s.python(a, b, "train.py(12): tokenize"),
}


@pytest.mark.parametrize("cause", HOLD_UPS)
def test_what_the_late_thread_did_is_the_cause(cause):
    found = shares(repeated(Scene(), late(HOLD_UPS[cause])))

    assert max(found, key=found.get) == cause
    assert found[cause] == pytest.approx(0.9, abs=0.02)


def test_a_copy_alone_on_the_device_is_in_the_way():
    def step(scene: Scene, t: float) -> None:
        scene.copy(t, t + 8000, 64 << 20)
        scene.kernel(t + 8010, t + 9990)

    assert shares(repeated(Scene(), step))[Cause.COPY] == pytest.approx(0.8, abs=0.01)


def test_a_copy_beside_a_kernel_is_not():
    def step(scene: Scene, t: float) -> None:
        scene.copy(t, t + 8000, 64 << 20, stream=8)
        scene.kernel(t, t + 9990)

    assert Cause.COPY not in shares(repeated(Scene(), step))


def test_a_collective_alone_is_waiting_for_other_devices():
    def step(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 4000)
        scene.kernel(t + 4001, t + 9990, name="ncclKernel", kind=DeviceKind.COLLECTIVE)

    assert shares(repeated(Scene(), step))[Cause.COLLECTIVE] == pytest.approx(0.6, abs=0.01)


def test_a_wait_for_the_device_is_to_blame_up_to_its_own_length():
    """The wait of 1 ms costs 1 ms of each step: one of ten; 8 ms are the code's own."""

    def short(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 9000, launched=t - 50)
        scene.sync(t, t + 9000)

    def long(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 1000, launched=t - 50)
        scene.sync(t, t + 1000)
        scene.python(t + 1000, t + 9950, "train.py(3): slow")

    assert set(shares(repeated(Scene(), short))) == {Cause.SYNCHRONIZATION}
    found = shares(repeated(Scene(), long))
    assert found[Cause.HOST] == pytest.approx(0.8, abs=0.02)
    assert found[Cause.SYNCHRONIZATION] == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(
    ("cause", "reason"), [(Cause.RUN_QUEUE, ""), (Cause.STOPPED, "stopped"), (Cause.IO, "read")]
)
def test_a_thread_may_be_kept_from_running_within_the_call_that_launches(cause, reason):
    """A quota that is spent in the middle of a launch is no launch overhead."""

    def step(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 1000)
        scene.call(t + 1500, t + 9998, "cudaLaunchKernel", CallKind.LAUNCH)
        scene.rows["calls"][-1]["correlation"] = scene.correlation + 1
        if reason:
            scene.blocked(t + 1502, t + 9980, reason)
        else:
            scene.runqueue(t + 1502, t + 9980)
        scene.kernel(t + 9990, t + 9995, launched=t + 9990)
        scene.rows["calls"].pop()  # it is the call above that launched it

    found = shares(repeated(Scene(), step))
    assert found[cause] == pytest.approx(0.9, abs=0.02)


def test_reading_a_result_back_belongs_to_the_wait():
    def step(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 5000, launched=t - 50)
        scene.copy(
            t + 5002, t + 5004, 4, called=t, direction=CopyDirection.D2H, memory=Memory.PINNED
        )
        scene.sync(t + 10, t + 5010)

    assert set(shares(repeated(Scene(), step, 5200))) == {Cause.SYNCHRONIZATION}


@pytest.mark.parametrize(
    ("reports", "cause"),
    [
        ((), Cause.NOT_TAKEN),
        ((used_by_another(),), Cause.GPU_CONTENTION),
        ((used_by_another(0.0),), Cause.NOT_TAKEN),
        ((replace(used_by_another(), pid=PID),), Cause.NOT_TAKEN),
        ((replace(used_by_another(), device=1),), Cause.NOT_TAKEN),
    ],
)
@pytest.mark.parametrize("listed", [True, False])
def test_work_that_was_not_begun_blames_another_process_that_used_the_device(
    reports, cause, listed
):
    """If the driver does not list the program, one of those that it lists may be the program."""

    def step(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 1000, launched=t - 9000)

    gpus = {PID: [0]} if listed else {PID + 1: [0]}
    found = shares(repeated(Scene(), step, 3000), busy_of=reports, gpus_of=gpus)
    if not listed and not any(use.pid == PID for use in reports):
        cause = Cause.NOT_TAKEN
    assert found[cause] == pytest.approx(0.67, abs=0.03)


def test_kernels_that_a_co_tenant_interrupted_count_as_long_as_they_usually_are():
    def step(scene: Scene, t: float) -> None:
        for number in range(30):
            begin = t + number * 50
            scene.kernel(begin, begin + 49, launched=t - 9000)
        scene.kernel(t + 4000, t + 8049, launched=t - 9000)  # of which 4 ms were another's turn

    found = shares(repeated(Scene(), step), busy_of=[used_by_another()])
    assert found[Cause.GPU_CONTENTION] == pytest.approx(0.85, abs=0.03)


def test_launches_that_cannot_keep_up():
    scene = Scene()
    for number in range(500):
        t = 1_000_000 + number * 30
        scene.kernel(t, t + 3, launched=t - 6)

    assert shares(scene)[Cause.LAUNCH] == pytest.approx(0.9, abs=0.02)


def test_latency_between_queued_kernels_is_short():
    scene = Scene()
    for number in range(500):
        t = 1_000_000 + number * 10
        scene.kernel(t, t + 8, launched=t - 5000)

    assert set(shares(scene)) == {Cause.KERNEL_GAP}


def test_the_interpreter_lock_is_known_by_the_switch_interval():
    def step(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 100)
        for number in range(2):
            scene.blocked(t + 150 + number * 5000, t + 5100 + number * 5000, "futex")

    found = shares(repeated(Scene(), step, 10_400))
    assert max(found, key=found.get) == Cause.GIL


def test_faults_that_take_cpu_are_known_by_samples():
    scene = repeated(Scene(), lambda s, t: s.kernel(t, t + 500))
    track = scene.thread()
    times = np.arange(900_000_000, 1_300_000_000, 50_000_000)
    count = len(times)
    samples = Samples(
        time_ns=times,
        track=np.full(count, track, np.int32),
        weight_ns=np.full(count, 10_000_000),
        name=np.zeros(count, np.int32),
        fault=np.arange(count) % 5 > 0,
    )

    assert shares(scene, samples=samples, tick_ns=50_000_000)[Cause.PAGE_FAULT] > 0.7
    assert Cause.PAGE_FAULT not in shares(scene)


def test_blame_sums_to_the_stalls_exactly():
    rng = np.random.default_rng(7)
    scene = Scene()
    t = 1_000_000.0
    for _ in range(3000):
        t += float(rng.exponential(200))
        length = float(rng.exponential(150))
        choice = rng.integers(6)
        if choice == 0:
            scene.copy(t, t + length, int(rng.integers(1, 1 << 20)), stream=int(rng.integers(7, 9)))
        elif choice == 1:
            scene.sync(t, t + length)
        elif choice == 2:
            scene.blocked(t, t + length, ["futex", "read", "stopped"][int(rng.integers(3))])
        else:
            scene.kernel(t, t + length, launched=t - float(rng.exponential(100)))
    found = blame_device(scene.timeline(), 0)
    stalls = found.stalls

    assert (stalls.start[1:] >= stalls.end[:-1]).all()
    assert stalls.duration_ns.min() > 0
    assert sum(found.total_ns(key) for key in CAUSES) == stalls.window_ns - stalls.computing.total


def test_what_lies_outside_the_traced_windows_is_not_idle():
    scene = repeated(Scene(), lambda s, t: s.kernel(t, t + 5000))
    windows = [(1_000_000_000, 1_005_000_000), (1_100_000_000, 1_105_000_000)]
    verdict = explain(scene.timeline(windows_ns=windows)).verdicts[0]

    assert verdict.window_ns == 10_000_000
    assert verdict.computing == 1.0


def test_without_a_device_there_is_nothing_to_explain():
    scene = Scene()
    scene.python(0, 10, "train.py(1): main")
    explanation = explain(scene.timeline())

    assert not explanation.verdicts
    assert "no busy thread" in explanation.notes[0]


def test_each_device_has_its_own_verdict():
    scene = Scene()
    for number in range(50):
        t = 1_000_000 + number * 10_000
        scene.kernel(t, t + 9990, launched=t - 3000, name="gemm", device=0)
        scene.kernel(t, t + 1000, name="gemm", device=1, tid=101)
        scene.blocked(t + 1200, t + 9900, "futex", tid=101)
    verdicts = explain(scene.timeline()).verdicts

    assert [one.bound for one in verdicts] == [Bound.COMPUTE, Bound.LOCK]


def test_no_timeline_however_odd_is_a_defect():
    """Random events, nested or not, joined or not, of several devices and threads."""
    rng = np.random.default_rng(11)
    for _ in range(60):
        scene = Scene()
        for _ in range(int(rng.integers(1, 80))):
            begin = float(rng.integers(0, 100_000))
            end = begin + float(rng.choice([0, 1, 30, 500, 20_000]))
            tid = 100 + int(rng.integers(3))
            match int(rng.integers(7)):
                case 0:
                    scene.copy(begin, end, int(rng.integers(0, 1 << 24)), called=end)
                case 1:
                    scene.sync(begin, end)
                case 2:
                    scene.python(begin, end, f"f{begin % 3}.py(1): g", tid)
                case 3:
                    scene.blocked(begin, end, "futex", tid)
                case 4:
                    scene.runqueue(begin, end)
                case _:
                    name = f"kernel{int(rng.integers(3))}"
                    device = int(rng.integers(2))
                    scene.kernel(
                        begin, end, launched=begin - float(rng.integers(-50, 5000)), name=name,
                        stream=int(rng.integers(3)), device=device, tid=tid,
                    )  # fmt: skip
        windows = [(0, 0), (10_000_000, 40_000_000)] if rng.random() < 0.3 else []
        for verdict in explain(scene.timeline(windows_ns=windows)).verdicts:
            stalled = verdict.window_ns - round(verdict.computing * verdict.window_ns)
            assert sum(one.ns for one in verdict.causes) == pytest.approx(stalled, abs=2)
            assert verdict.bounds


def shared_with_a_co_tenant(kernel: float, pace: float, *, co_tenant: bool) -> tuple[Scene, float]:
    """25 steps of 100 kernels on a device that a co-tenant gets for 2 ms whenever it is free or its
    turn comes; and how long they took."""
    rng = random.Random(1)
    scene = Scene()
    host = device = 1e6
    turn, until = 2000.0, 1e6 + 2000
    for _ in range(25):
        for _ in range(100):
            host += pace * rng.uniform(0.9, 1.1)
            begin = max(host + 5, device + 1)
            if co_tenant and begin > device + 2:
                begin = device + turn * math.ceil((begin - device) / turn)
                until = begin + turn
            elif co_tenant and begin >= until:
                begin, until = device + turn, device + 2 * turn
            end = begin + kernel
            if co_tenant and end > until:
                end += turn
                until = end + turn
            scene.kernel(begin, end, launched=host - 4, name="gemm", blocks=64)
            device = end
        end = max(device, host) + 3
        scene.sync(host + 1, end)
        host = end
    return scene, host - 1e6


@pytest.mark.parametrize(("kernel", "pace"), [(30, 6), (10, 10), (8, 12), (5, 10), (3, 10)])
def test_a_co_tenants_share_is_what_the_work_would_gain_without_it(kernel, pace):
    """Where the host sets the pace, too: what it launches during the other's turn has no gaps."""
    scene, together = shared_with_a_co_tenant(kernel, pace, co_tenant=True)
    _, alone = shared_with_a_co_tenant(kernel, pace, co_tenant=False)

    found = shares(scene, busy_of=[used_by_another()])
    assert found[Cause.GPU_CONTENTION] == pytest.approx(1 - alone / together, abs=0.02)


def test_the_few_samples_of_a_tick_are_drawn_to_those_of_all_stalls():
    """Three in five serve faults, so whole stalls are theirs, whichever samples fell into them."""
    scene = Scene()
    for step in range(20):
        t = 1_000_000.0 + step * 50_000
        scene.kernel(t, t + 1000)
    track = scene.thread()
    time = np.arange(1_000_000_000, 2_000_000_000, 10_000_000, dtype=np.int64)
    fault = np.arange(len(time)) % 5 < 3
    samples = Samples(
        time, np.full(len(time), track, np.int32), np.full(len(time), 10_000_000),
        np.zeros(len(time), np.int32), fault,
    )  # fmt: skip

    assert shares(scene, samples=samples, tick_ns=10_000_000)[Cause.PAGE_FAULT] > 0.9


@pytest.mark.parametrize("waits", [True, False])
def test_kernels_that_the_thread_waits_for_limit_the_work_beside_stalls(waits):
    """Each step computes for 7 ms and prepares for 3. Who waits would be faster by either."""

    def step(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 7000, name="gemm", launched=t - 20)
        if waits:
            scene.sync(t + 5, t + 7002)
        else:
            scene.python(t + 5, t + 6990, "train.py(2): prepare")
        scene.python(t + 7010, t + 9970, "train.py(3): tokenize")

    (verdict,) = explain(repeated(Scene(), step).timeline()).verdicts
    named = {one.key: one.share for one in verdict.bounds}

    assert verdict.bounds[0].key in (Bound.HOST, Bound.SYNCHRONIZATION)
    assert named.get(Bound.COMPUTE) == (pytest.approx(0.7, abs=0.02) if waits else None)
