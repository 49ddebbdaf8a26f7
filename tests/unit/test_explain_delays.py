# SPDX-License-Identifier: Apache-2.0
"""What a wait costs beyond its own length: owed once, dealt out by lengths, settled by waits."""

from __future__ import annotations

import pytest

from sonde.model.causes import Cause
from sonde.model.timeline import CallKind, CopyDirection, DeviceKind, Memory, WaitDetail
from timelines import Scene, repeated, shares


def test_what_delayed_a_thread_while_the_device_had_work_is_to_blame_for_the_gap_behind():
    """Without 4 ms of writing, the code that follows would not have been late."""

    def step(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 5000)
        scene.blocked(t + 500, t + 4500, "sync to disk")
        scene.python(t + 4500, t + 6990, "train.py(3): forward")

    def without(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 5000)
        scene.python(t + 500, t + 6990, "train.py(3): forward")

    assert set(shares(repeated(Scene(), step, 7000))) == {Cause.IO}
    assert set(shares(repeated(Scene(), without, 7000))) == {Cause.HOST}


def test_a_delay_excuses_no_more_than_its_length():
    """Of 4 ms that the device waits each step, the 1 ms of writing has a quarter."""

    def step(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 2000)
        scene.blocked(t + 500, t + 1500, "sync to disk")
        scene.python(t + 1500, t + 5990, "train.py(3): tokenize")

    found = shares(repeated(Scene(), step, 6000))
    assert found[Cause.IO] == pytest.approx(1 / 6, abs=0.02)
    assert found[Cause.HOST] == pytest.approx(3 / 6, abs=0.03)


def test_who_is_stopped_while_it_waits_for_the_device_would_have_waited_anyway():
    def step(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 5000, launched=t - 50)
        scene.sync(t, t + 5002)
        scene.blocked(t + 100, t + 4900, "stopped")

    assert set(shares(repeated(Scene(), step, 5100))) == {Cause.SYNCHRONIZATION}


def test_a_wait_for_the_device_settles_what_was_owed_before_it():
    """The device caught up: writing beside its work costs nothing then."""

    def step(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 5000, launched=t - 10)
        scene.blocked(t + 100, t + 2000, "sync to disk")
        scene.sync(t + 2100, t + 5002)

    assert set(shares(repeated(Scene(), step, 5100))) == {Cause.SYNCHRONIZATION}


def test_a_thread_that_waits_for_one_that_launches_owes_nothing():
    """As the main thread does for the one that runs the backward pass."""

    def step(scene: Scene, t: float) -> None:
        scene.blocked(t + 50, t + 3690, "futex")
        for number in range(40):
            begin = t + 100 + 90 * number
            scene.kernel(begin, begin + 80, tid=7)
        for number in range(40):
            begin = t + 3700 + 90 * number
            scene.kernel(begin, begin + 30)

    found = shares(repeated(Scene(), step, 8000))
    assert found[Cause.LAUNCH] > 0.3
    assert Cause.LOCK not in found


@pytest.mark.parametrize("reason", ["futex", "gil"])
def test_nor_for_the_interpreter_lock(reason):
    """Which another thread had while it launched in its place."""

    def step(scene: Scene, t: float) -> None:
        scene.blocked(t + 50, t + 3690, "futex")
        if reason == "gil":
            scene.rows["states"][-1]["wait_detail"] = WaitDetail.GIL
        for number in range(80):
            begin = t + 100 + 45 * number
            scene.kernel(begin, begin + 80, tid=7)
        scene.python(t + 3690, t + 7990, "train.py(3): tokenize")

    assert Cause.HOST in shares(repeated(Scene(), step, 8000))
    assert not {Cause.LOCK, Cause.GIL} & set(shares(repeated(Scene(), step, 8000)))


def blocking_copy(scene: Scene, begin: float, end: float) -> None:
    """A copy and the call that returns when it is done."""
    scene.copy(begin + 10, end - 5, 64 << 20, called=begin)
    scene.rows["calls"].pop()
    scene.call(begin, end, "cudaMemcpy", CallKind.COPY)
    scene.rows["calls"][-1]["correlation"] = scene.correlation


def test_a_blocking_copy_costs_what_it_takes_and_no_more():
    """5 ms of copying, then 5 ms of code: half each."""

    def step(scene: Scene, t: float) -> None:
        blocking_copy(scene, t, t + 5000)
        scene.python(t + 5000, t + 9900, "train.py(3): tokenize")
        scene.kernel(t + 9910, t + 9990)

    found = shares(repeated(Scene(), step))
    assert found[Cause.COPY] == pytest.approx(0.5, abs=0.01)
    assert found[Cause.HOST] == pytest.approx(0.49, abs=0.01)


@pytest.mark.parametrize("kind", [DeviceKind.COPY, DeviceKind.COLLECTIVE])
def test_a_wait_for_a_copy_or_for_others_is_not_owed_beyond_them(kind):
    """The thread waits for 5 ms of it, then takes 4 ms itself."""

    def step(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 5000, launched=t - 20, name="it", kind=kind)
        scene.sync(t + 5, t + 5005)
        scene.python(t + 5005, t + 9000, "train.py(3): tokenize")
        scene.kernel(t + 9010, t + 9980)

    found = shares(repeated(Scene(), step))
    assert found[Cause.COPY if kind == DeviceKind.COPY else Cause.COLLECTIVE] == pytest.approx(
        0.5, abs=0.01
    )
    assert found[Cause.HOST] == pytest.approx(0.4, abs=0.01)


def test_parts_of_stalls_are_dealt_out_by_their_lengths():
    """Half of each stall is owed, they are 4 and 1 ms long in turn."""
    scene = Scene()
    t = 1_000_000.0
    for number in range(400):
        stall = 4000 if number % 2 else 1000
        scene.kernel(t, t + 1000)
        scene.blocked(t + 100, t + 100 + stall / 2, "sync to disk")
        scene.python(t + 100 + stall / 2, t + 990 + stall, "train.py(3): tokenize")
        t += 1000 + stall

    found = shares(scene)
    assert found[Cause.IO] == pytest.approx(2.5 / 7, abs=0.005)
    assert found[Cause.HOST] == pytest.approx(2.5 / 7, abs=0.01)


def test_several_causes_that_owe_a_stall_have_it_by_their_parts():
    """3 ms of each step are owed: 2 by a write, 1 by a lock."""

    def step(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 4000)
        scene.blocked(t + 500, t + 2500, "sync to disk")
        scene.blocked(t + 2500, t + 3500, "futex")
        scene.python(t + 3500, t + 6990, "train.py(3): forward")

    found = shares(repeated(Scene(), step, 7000))
    assert found[Cause.IO] == pytest.approx(2 / 7, abs=0.03)
    assert found[Cause.LOCK] == pytest.approx(1 / 7, abs=0.03)
    assert found.get(Cause.HOST, 0.0) < 0.03


def prepared_while_computing(scene: Scene, t: float, then) -> None:
    """4 ms of writing beside 5 ms of kernels, something, and 2.5 ms without a kernel."""
    scene.kernel(t, t + 5000, launched=t - 20)
    scene.blocked(t + 100, t + 4100, "sync to disk")
    then(scene, t + 4150)
    scene.python(t + 4300, t + 7470, "train.py(3): forward")


def test_a_copy_that_is_only_asked_for_settles_nothing():
    """It does not wait for the device, so the writing is still to blame."""

    def pinned(scene: Scene, t: float) -> None:
        scene.copy(t + 860, t + 870, 4096, called=t, memory=Memory.PINNED)
        scene.rows["calls"][-1]["end_ns"] += 6_000

    def staged(scene: Scene, t: float) -> None:
        scene.copy(t + 860, t + 870, 4096, called=t)
        scene.rows["calls"][-1]["end_ns"] += 6_000

    for then in (pinned, staged):
        found = shares(
            repeated(Scene(), lambda s, t, n=then: prepared_while_computing(s, t, n), 7500)
        )
        assert found[Cause.IO] == pytest.approx(2.5 / 7.5, abs=0.02)


def test_one_that_waits_for_its_result_settles_it():
    """The device was behind by then whatever was written before."""

    def step(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 5000, launched=t - 20)
        scene.blocked(t + 100, t + 4100, "sync to disk")
        scene.copy(t + 5002, t + 5010, 1 << 20, called=t + 4150, direction=CopyDirection.D2H)
        scene.rows["calls"][-1]["end_ns"] = round((t + 5012) * 1000)
        scene.python(t + 5012, t + 7470, "train.py(3): forward")

    found = shares(repeated(Scene(), step, 7500))
    assert Cause.IO not in found


def test_a_launch_that_finds_the_queue_full_settles_what_was_owed():
    """Written while the device was behind, then launched until there was no more room."""
    scene = Scene()
    host = device = 1_000_000.0
    begun: list[float] = []

    def launches(count: int) -> None:
        nonlocal host, device
        for _ in range(count):
            room = begun[-1000] if len(begun) >= 1000 else host
            begin = max(device, host + 5, room)
            scene.kernel(begin, begin + 10, launched=host)
            host = max(host + 2, room)
            scene.rows["calls"][-1]["end_ns"] = round(host * 1000)
            begun.append(begin)
            device = begin + 10

    for _ in range(8):
        launches(1500)
        scene.blocked(host, host + 3000, "sync to disk")
        host += 3000
        launches(600)  # of which 300 find room
        scene.python(host, host + 14_000, "train.py(3): tokenize")
        host += 14_000

    assert set(shares(scene)) == {Cause.HOST}


def test_delays_before_the_first_kernel_owe_nothing():
    scene = Scene()
    scene.blocked(0, 900_000, "sync to disk")
    for number in range(500):
        t = 1_000_000 + number * 30
        scene.kernel(t, t + 3, launched=t - 6)

    assert Cause.IO not in shares(scene)
