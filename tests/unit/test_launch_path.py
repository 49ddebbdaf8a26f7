# SPDX-License-Identifier: Apache-2.0
"""What of a thread's time is launch overhead, and what is code, in traces with functions."""

from __future__ import annotations

import pytest

from sonde.analyze.bound import explain
from sonde.model.causes import Bound, Cause
from sonde.model.timeline import CallKind, HostKind
from timelines import Scene, repeated, shares


def operator(scene: Scene, begin: float, end: float, name: str, tid: int = 100) -> None:
    track = scene.thread(tid)
    scene._add("host", begin, end, name=name, kind=HostKind.OPERATOR, track=track)


def eager(kernels: int, gap: float, inside: str = ""):
    """A step of small kernels, an operator around each launch; `gap` µs between operators, in a
    function of the program or, if given, in `inside`."""

    def step(scene: Scene, t: float) -> None:
        scene.python(t - 20, t + kernels * (40 + gap), "train.py(12): step")
        for number in range(kernels):
            at = t + number * (40 + gap)
            operator(scene, at, at + 40, "aten::add")
            scene.kernel(at + 38, at + 39.5, launched=at + 30)
            if inside:
                scene.python(at + 40, at + 40 + gap, inside)

    return step


@pytest.mark.parametrize(("gap", "cause"), [(2, Cause.LAUNCH), (160, Cause.HOST)])
def test_operators_that_launch_are_overhead_and_what_lies_between_is_code(gap, cause):
    """160 µs of code before each launch were launch overhead once, as any time up to 0.2 ms."""
    found = shares(repeated(Scene(), eager(20, gap), 20 * (40 + gap) + 50))

    assert max(found, key=found.get) == cause


@pytest.mark.parametrize(
    ("inside", "cause"),
    [
        ("torch/nn/modules/module.py(1751): _call_impl", Cause.LAUNCH),
        ("torch/optim/adamw.py(220): step", Cause.LAUNCH),
        ("torch/serialization.py(850): save", Cause.HOST),
        ("PIL/Image.py(2365): resize", Cause.HOST),
        ("nets/model.py(4): forward", Cause.HOST),
        ("contextlib.py(12): inner", Cause.HOST),
        ("torch/_inductor/compile_fx.py(3): compile_fx", Cause.BUILD),
        ("torch/utils/data/dataloader.py(630): __next__", Cause.INPUT),
        ("queue.py(154): get", Cause.INPUT),
        ("queue.py(122): put", Cause.LOCK),
        ("threading.py(655): wait", Cause.INPUT),
        ("threading.py(1024): acquire", Cause.LOCK),
    ],
)
def test_whose_code_it_is_follows_from_the_file(inside, cause):
    found = shares(repeated(Scene(), eager(10, 300, inside), 3600))

    assert max(found, key=found.get) == cause


def test_an_operator_that_computes_on_the_cpu_is_code_also_within_one_that_launches():
    def step(scene: Scene, t: float) -> None:
        scene.python(t, t + 1000, "train.py(12): step")
        operator(scene, t + 5, t + 990, "aten::to")
        operator(scene, t + 10, t + 900, "aten::_to_copy")
        operator(scene, t + 15, t + 890, "aten::copy_")
        scene.kernel(t + 985, t + 995, launched=t + 970)

    found = shares(repeated(Scene(), step, 1000))
    assert found[Cause.HOST] > 0.9


def test_garbage_collection_in_each_step_is_code_of_the_step():
    """Between the operators of 40 layers, so that no single gap is long."""

    def step(scene: Scene, t: float) -> None:
        scene.python(t, t + 8000, "train.py(30): step")
        for number in range(40):
            at = t + number * 200
            scene.python(at, at + 150, "<built-in function collect>")
            operator(scene, at + 152, at + 195, "aten::linear")
            scene.kernel(at + 190, at + 198, launched=at + 180)

    timeline = repeated(Scene(), step, 8000).timeline()
    (verdict,) = explain(timeline).verdicts
    assert verdict.bounds[0].key == Bound.HOST
    assert verdict.causes[0].locations[0].function == "collect() in step train.py:30"


def test_code_that_takes_longer_than_the_waits_before_it_outranks_them():
    """The device computes for 38 %, while the thread waits; 60 % is code with an idle device."""

    def step(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 3800, launched=t - 50)
        scene.sync(t, t + 3800)
        scene.python(t + 3800, t + 9900, "train.py(3): resize")

    found = shares(repeated(Scene(), step))
    assert found[Cause.HOST] == pytest.approx(0.6, abs=0.03)


def test_a_boolean_index_waits_for_its_result():
    """aten::nonzero copies the number of results to the host, and waits for it, in an operator."""

    def step(scene: Scene, t: float) -> None:
        scene.python(t, t + 2000, "train.py(9): step")
        scene.kernel(t + 20, t + 900, launched=t + 5)
        operator(scene, t + 30, t + 960, "aten::index")
        operator(scene, t + 40, t + 950, "aten::nonzero")
        scene.call(t + 60, t + 905, "cudaStreamSynchronize", CallKind.SYNC)
        for number in range(10):
            at = t + 960 + number * 40
            operator(scene, at, at + 38, "aten::add")
            scene.kernel(at + 36, at + 38, launched=at + 30)

    timeline = repeated(Scene(), step, 1400).timeline()
    (verdict,) = explain(timeline).verdicts
    assert verdict.bounds[0].key == Bound.SYNCHRONIZATION
    assert verdict.causes[0].locations[0].function == "step train.py:9"


def test_saving_every_tenth_step_is_a_phase_of_its_own():
    def checkpointed(scene: Scene, number: int, t: float) -> float:
        scene.python(t, t + 1000, "train.py(12): step")
        for kernel in range(8):
            scene.kernel(t + 120 * kernel, t + 120 * kernel + 110, launched=t - 30 + 120 * kernel)
        if number % 10:
            return t + 1000
        scene.python(t + 1000, t + 9000, "train.py(40): save")
        scene.python(t + 1000, t + 9000, "torch/serialization.py(850): save")
        return t + 9000

    scene, t = Scene(), 1_000_000.0
    for number in range(60):
        t = checkpointed(scene, number, t)
    (verdict,) = explain(scene.timeline()).verdicts

    assert verdict.bounds[0].key == Bound.HOST
    assert verdict.causes[0].share == pytest.approx(0.43, abs=0.03)
    assert verdict.causes[0].locations[0].function == "save train.py:40"


def test_two_causes_of_a_fifth_each_are_both_reported():
    def step(scene: Scene, t: float) -> None:
        scene.kernel(t, t + 6000, launched=t - 20)
        scene.python(t + 6000, t + 8000, "train.py(3): tokenize")
        scene.kernel(t + 8000, t + 8010, launched=t + 7990)
        scene.range(t + 8020, t + 9800, "enumerate(DataLoader)#_SingleProcess.__next__")

    (verdict,) = explain(repeated(Scene(), step).timeline()).verdicts
    assert {one.key for one in verdict.bounds} == {Bound.HOST, Bound.INPUT}
