# SPDX-License-Identifier: Apache-2.0
"""Steps are found without instrumentation: under jitter, nesting, evaluation phases."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from sonde.analyze.bound import explain
from sonde.analyze.stalls import stalls_of
from sonde.analyze.steps import steps_of as find
from sonde.model.timeline import CopyDirection, Memory
from timelines import Scene

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.explain.simulate import simulated

from sonde.model.causes import Bound


def steps_of(scene: Scene):
    return explain(scene.timeline()).verdicts[0].steps


def training(scene: Scene, rng: random.Random, count: int, layers: int = 12, jitter: float = 0.3):
    """Steps as a transformer has them; returns the time that each began."""
    t = 1_000_000.0
    began = []

    def run(name: str, length: float) -> None:
        nonlocal t
        length *= 1 + rng.uniform(-jitter, jitter)
        scene.kernel(t, t + length, launched=t - 200, name=name)
        t += length + rng.uniform(1, 3)

    for _ in range(count):
        began.append(t)
        scene.copy(t, t + 50, 1 << 20, called=t - 200)
        t += 52
        run("embedding", 40)
        for direction in ("forward", "backward"):
            for _ in range(layers):
                run(f"gemm_{direction}", 100)
                run(f"norm_{direction}", 20)
                run(f"gemm_{direction}_2", 90)
        run("adam", 150)
    return began


def test_layers_within_a_step_are_not_taken_for_steps():
    scene = Scene()
    began = training(scene, random.Random(1), 30)
    found = steps_of(scene)

    assert found.count == 29
    assert found.operations == 75
    period = (began[-1] - began[0]) / 29 * 1000
    assert found.median_ns == pytest.approx(period, rel=0.02)


def test_kernels_that_come_and_go_do_not_hide_the_period():
    rng = random.Random(2)
    scene = Scene()
    t = 1_000_000.0
    for _ in range(40):
        for name in ["load", "a", "b"] * 3 + ["c"] + ["extra"] * rng.randint(0, 2) + ["adam"]:
            scene.kernel(t, t + 100, launched=t - 300, name=name)
            t += 101 + rng.expovariate(0.2)
        scene.sync(t, t + 5)
        t += 20
    found = steps_of(scene)

    assert found.count == pytest.approx(39, abs=1)
    assert found.median_ns == pytest.approx(1_340_000, rel=0.2)


def test_an_evaluation_phase_between_training_steps():
    scene = Scene()
    t = 1_000_000.0
    for number in range(60):
        for name in ["fwd"] * 4 + ["loss"] + ["bwd"] * 4 + ["sgd"]:
            scene.kernel(t, t + 100, launched=t - 300, name=f"{name}")
            t += 101
        scene.copy(t, t + 2, 4, direction=CopyDirection.D2H, memory=Memory.PINNED, called=t - 50)
        scene.sync(t - 40, t + 3)
        t += 20
        if number % 20 == 19:
            for _ in range(10):
                for name in ["fwd"] * 4 + ["metric"]:
                    scene.kernel(t, t + 100, launched=t - 300, name=name)
                    t += 101
    found = steps_of(scene)

    assert found.count == 59
    assert found.operations == 11
    assert found.median_ns == pytest.approx(1_030_000, rel=0.01)
    assert 0.9 < found.regularity < 1


def test_steps_known_by_the_gaps_between_them_alone():
    scene = Scene()
    for step in range(30):
        t = 1_000_000 + step * 5000
        for number in range(4):
            scene.kernel(t + number * 101, t + number * 101 + 100, launched=t - 10, name="gemm")
    found = steps_of(scene)

    assert found.count == pytest.approx(29, abs=1)
    assert found.median_ns == 5_000_000


def test_products_that_occur_twice_a_step_do_not_halve_it():
    """The second of two equal layers is followed by the next batch's copy."""
    scene = Scene()
    for step in range(30):
        t = 1_000_000.0 + step * 1000
        scene.copy(t, t + 100, 1 << 20, called=t - 200)
        for layer in range(2):
            for number, name in enumerate(("gemm", "relu")):
                at = t + 101 + 200 * layer + 100 * number
                scene.kernel(at, at + 99, launched=at - 200, name=name)
    found = steps_of(scene)

    assert found.operations == 5
    assert found.median_ns == 1_000_000
    assert found.regularity == 1


def test_where_only_equal_kernels_repeat_the_programs_functions_show_its_steps():
    scene = Scene()
    scene.python(999_000, 1_100_000, "train.py(1): main")
    for step in range(30):
        t = 1_000_000.0 + step * 840
        scene.python(t - 15, t + 820, "train.py(9): step")
        for number in range(12):
            at = t + 70 * number
            scene.kernel(at, at + 60, launched=at - 10, name="abcd"[number % 4])
    found = steps_of(scene)

    assert found.anchor == "train.py(9): step"
    assert found.operations == 12
    assert found.median_ns == 840_000


def test_without_functions_it_is_the_loop_within_that_is_found():
    """What cannot be known is not guessed: the shortest stretch that repeats, not the author's."""
    scene = Scene()
    for step in range(30):
        for number in range(12):
            at = 1_000_000.0 + step * 840 + 70 * number
            scene.kernel(at, at + 60, launched=at - 10, name="abcd"[number % 4])

    assert steps_of(scene).operations == 4


def test_ranges_that_count_are_steps():
    scene = Scene()
    for step in range(12):
        t = 1_000_000.0 + step * 1000
        scene.range(t - 20, t + 900, f"ProfilerStep#{step}")
        for number in range(3):
            scene.kernel(t + 100 * number, t + 100 * number + 90, launched=t, name="gemm")
    found = steps_of(scene)

    assert found.operations == 3
    assert found.median_ns == 1_000_000


def test_an_evaluation_with_more_batches_than_there_are_steps_between():
    scene = Scene()
    t = 1_000_000.0
    for number in range(60):
        for _ in range(1 if number % 10 else 15):  # an evaluation's batches before each tenth
            names = ["fwd"] * 4 if number % 10 else ["fwd"] * 3
            for name in [*names, *(["bwd"] * 4 if number % 10 else []), "end"]:
                scene.kernel(t, t + 100, launched=t - 300, name=name)
                t += 101
            scene.copy(
                t, t + 2, 4, direction=CopyDirection.D2H, memory=Memory.PINNED, called=t - 50
            )
            t += 20
    found = steps_of(scene)

    assert found.operations == 10
    assert found.median_ns == 929_000


def test_programs_at_random():
    """As `python -m bench.explain.simulate`: 92 % of 400 within 1 %."""
    right = 0
    for seed in range(20_000, 20_060):
        timeline, truth, _ = simulated(seed)
        table = find(timeline, stalls_of(timeline, 0))
        right += table is not None and abs(table.median_ns - truth) <= 0.01 * truth

    assert right >= 52


def test_where_nothing_repeats_there_are_no_steps():
    rng = random.Random(3)
    scene = Scene()
    t = 1_000_000.0
    for number in range(300):
        scene.kernel(t, t + 100, launched=t - 300, name=f"kernel_{number}")
        t += 101 + rng.uniform(0, 5)

    assert steps_of(scene) is None


def test_the_critical_path_sums_to_the_step():
    scene = Scene()
    training(scene, random.Random(4), 20)
    verdict = explain(scene.timeline()).verdicts[0]

    assert sum(part.share for part in verdict.critical_path) == pytest.approx(1, abs=0.35)
    assert "gemm" in verdict.critical_path[0].name


def test_the_critical_path_goes_through_the_late_host():
    scene = Scene()
    for step in range(20):
        t = 1_000_000 + step * 10_000
        scene.kernel(t, t + 1000, name="gemm")
        scene.kernel(t + 1001, t + 2000, launched=t + 20, name="norm")
        scene.sync(t + 30, t + 2005)
        scene.python(t + 2010, t + 9990, "train.py(7): tokenize")
    parts = explain(scene.timeline()).verdicts[0].critical_path

    assert parts[0].kind == "host"
    assert parts[0].share == pytest.approx(0.8, abs=0.03)


def test_the_critical_path_follows_wakers_from_thread_to_thread():
    """The launching thread waits for a loader, which waits for its disk."""
    scene = Scene()
    for step in range(20):
        t = 1_000_000 + step * 10_000
        scene.kernel(t, t + 1000, name="gemm")
        scene.kernel(t + 1001, t + 2000, launched=t + 20, name="norm")
        scene.sync(t + 30, t + 2005)
        scene.blocked(t + 2100, t + 9900, "futex", waker=7)
        scene.blocked(t + 2000, t + 7000, "read", tid=7)
    parts = {part.name: part.share for part in explain(scene.timeline()).verdicts[0].critical_path}

    assert parts["thread 7 of python (100) blocked: read"] == pytest.approx(0.49, abs=0.01)
    assert parts["code of thread 7 of python (100)"] == pytest.approx(0.29, abs=0.01)
    assert sum(parts.values()) == pytest.approx(1, abs=0.01)
    assert not any("futex" in name for name in parts)


def test_threads_that_wake_each_other_end_the_path():
    scene = Scene()
    for step in range(20):
        t = 1_000_000 + step * 10_000
        scene.kernel(t, t + 1000, name="gemm")
        scene.sync(t + 30, t + 1005)
        scene.blocked(t + 2100, t + 9900, "futex", waker=7)
        scene.blocked(t + 2000, t + 9950, "futex", tid=7, waker=100)
    parts = explain(scene.timeline()).verdicts[0].critical_path

    assert sum(part.share for part in parts) == pytest.approx(1, abs=0.01)


def test_a_phase_of_its_own_gets_a_verdict_of_its_own():
    """Training that keeps the device busy, with an evaluation between that waits for its data."""
    scene = Scene()
    t = 1_000_000.0
    for number in range(60):
        for name in ["gemm_fwd"] * 4 + ["loss"] + ["gemm_bwd"] * 4 + ["sgd"]:
            scene.kernel(t, t + 1000, launched=t - 3000, name=name)
            t += 1001
        if number == 29:
            for _ in range(20):
                scene.range(t + 100, t + 9900, "enumerate(DataLoader)#x.__next__")
                t += 10_000
                scene.kernel(t, t + 500, name="gemm_eval")
                t += 501
    verdict = explain(scene.timeline()).verdicts[0]

    assert [phase.name for phase in verdict.phases] == ["steps", "between steps"]
    steps, evaluation = verdict.phases
    assert steps.bounds[0].key == Bound.COMPUTE
    assert evaluation.bounds[0].key == Bound.INPUT
    assert evaluation.window_ns == pytest.approx(210_000_000, rel=0.05)
    assert steps.window_ns + evaluation.window_ns == verdict.window_ns


def test_steps_alone_have_no_phases():
    scene = Scene()
    training(scene, random.Random(5), 20)

    assert not explain(scene.timeline()).verdicts[0].phases


def test_a_slow_first_step_is_one_step():
    """Its allocations part it at stalls; the program's own function does not."""
    scene = Scene()
    t, began = 1_000_000.0, []
    for number in range(30):
        begin = t
        began.append(t)
        for part in ("load", "product", "relu", "product", "relu"):
            t += 2_000 if number == 0 else 10
            scene.kernel(t, t + 90, name=part)
            t += 90
        scene.python(begin, t, "train.py(7): step")
        t += 900  # memory is given back and asked for again
    found = steps_of(scene)

    assert found.operations == 5
    assert found.duration_ns[0] == pytest.approx((began[1] - began[0] - 1990) * 1000, rel=0.001)
    assert len(found.duration_ns) == 29


def test_a_loop_of_copies_is_not_the_step_though_it_holds_most_of_the_work():
    scene = Scene()
    t, began = 1_000_000.0, []
    for _ in range(12):
        began.append(t)
        for _ in range(150):
            scene.copy(t, t + 4, 256, called=t - 3)
            scene.sync(t + 2, t + 6)
            t += 20
        for name in ("product", "relu"):
            scene.kernel(t, t + 150, name=name)
            t += 160
    found = steps_of(scene)

    assert found.operations == 152
    assert found.median_ns == pytest.approx((began[1] - began[0]) * 1000, rel=0.01)
