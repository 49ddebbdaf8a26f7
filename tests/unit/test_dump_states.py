# SPDX-License-Identifier: Apache-2.0
"""A thread's state as ps(1) shows it, of the kernel's bits: task_state_index() of the kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sonde.collect import dump
from sonde.collect.dump import ThreadDump, ThreadState, state_letter

TASK_DEAD = 0x80


@pytest.mark.parametrize(
    ("bits", "letter"),
    [
        pytest.param(0x0, "R", id="running"),
        pytest.param(0x1, "S", id="interruptible"),
        pytest.param(0x2, "D", id="uninterruptible"),
        pytest.param(0x102, "D", id="killable"),
        pytest.param(0x402, "I", id="idle"),
        pytest.param(0x4, "T", id="stopped"),
        pytest.param(0x104, "T", id="stopped_and_wakes_by_kill"),
        pytest.param(0x8, "t", id="traced"),
        pytest.param(TASK_DEAD | 0x20, "Z", id="zombie"),
        pytest.param(TASK_DEAD | 0x10, "X", id="dead"),
        pytest.param(0x40, "P", id="parked"),
        pytest.param(0x8000, "D", id="frozen"),
        pytest.param(0x1000, "D", id="waits_for_a_lock_of_a_realtime_kernel"),
        pytest.param(0x200, "R", id="waking"),
        pytest.param(0x2001, "S", id="interruptible_and_freezable"),
    ],
)
def test_the_letter_is_that_of_ps(bits: int, letter: str) -> None:
    assert state_letter(bits) == letter


@pytest.mark.parametrize(("is_given_up", "kept"), [(True, [1, 2]), (False, [1])])
def test_a_thread_that_a_pass_did_not_reach_has_not_ended(
    is_given_up: bool, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dump, "PASS_S", 0.0)
    taken: Any = ThreadDump.__new__(ThreadDump)
    taken._is_given_up = False
    taken._sampler = SimpleNamespace(take=lambda: SimpleNamespace(rows=lambda names: []))
    slept = ThreadState(1, 0, "S", 7)

    def iterate() -> dict[int, ThreadState]:
        taken._is_given_up = is_given_up
        return {1: slept}

    taken._iterate = iterate
    threads = {tid: ThreadState(tid, 0, "R", 0) for tid in (1, 2)}
    taken._see_running(threads, {1, 2})

    assert sorted(threads) == kept
    assert threads[1] == slept
