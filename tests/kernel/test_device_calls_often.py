# SPDX-License-Identifier: Apache-2.0
"""A program that calls its device as often as a decoding loop: what is counted of it, and how often
its probes are hit."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from device_watch import DeviceWatch, Program

pytestmark = pytest.mark.bpf

BUDGET = 0.01
STEPS = 90_000
RARE = "clCreateBuffer"
HOT = ("clFlush", "clEnqueueCopyBuffer", "clFinish")


@pytest.fixture
def steps(program) -> Path:
    return program("../../bench/loads/device_steps")


def follow(watch: DeviceWatch, ran: Program) -> None:
    """Drain once a second until it ends, as a recording does."""
    ran.go()
    until = time.monotonic() + 60
    while ran.process.poll() is None and time.monotonic() < until:
        watch.poll_events(1.0)
        watch.drain()
    watch.finish(ran)


def hits(watch: DeviceWatch) -> int:
    numbers = list(watch.collector._probes.sites)
    return sum(watch.collector._bpf.sums("hits", numbers))


def test_totals_are_estimated_from_turns_and_rare_calls_are_exact(steps):
    with DeviceWatch(budget=BUDGET) as watch:
        ran = Program(steps, STEPS, "hold")
        watch.follow(ran, "ready")
        follow(watch, ran)
        assert watch.notes_of("probe_taken_off") == watch.notes_of("calls_left_out") == []
        [note] = [text for text in watch.notes_of("calls_sampled") if "clFinish" in text]
        was_hit = hits(watch)
    seen = {name: watch.calls[ran.pid, name, direction, 0]
            for name, direction in ((HOT[0], ""), (HOT[1], "d2d"), (HOT[2], ""))}  # fmt: skip
    true = {name: int(count) for name, count in map(str.split, ran.lines)}
    print(seen, true, was_hit, note)
    assert {name: seen[name] / true[name] for name in HOT} == pytest.approx(
        dict.fromkeys(HOT, 1.0), rel=0.25
    )
    assert (
        sum(count for key, count in watch.calls.items() if key[:2] == (ran.pid, RARE)) == true[RARE]
    )
    assert (ran.pid, "clWaitForEvents", "", 0) not in watch.calls  # within clFinish
    assert was_hit < 0.5 * sum(true.values())


def test_below_the_budget_all_are_counted(steps):
    with DeviceWatch(budget=1.0) as watch:
        ran = Program(steps, STEPS // 6, "hold")
        watch.follow(ran, "ready")
        follow(watch, ran)
        assert watch.notes_of("calls_sampled") == []
    for name, direction in (("clFlush", ""), ("clEnqueueCopyBuffer", "d2d"), ("clFinish", "")):
        assert watch.calls[ran.pid, name, direction, 0] == STEPS // 6
