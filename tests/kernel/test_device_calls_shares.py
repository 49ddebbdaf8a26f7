# SPDX-License-Identifier: Apache-2.0
"""Rows of device calls that one user fills, and probes that one user's loop makes too dear: what
becomes of the totals of another."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from device_watch import DeviceWatch, Program

pytestmark = pytest.mark.bpf

ATTACKER, VICTIM = 12_345, 20_001


@pytest.fixture
def calls(program, tmp_path: Path) -> Path:
    """The program, where every user can run it."""
    for part in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        part.chmod(0o755)
    copy = tmp_path / "many_statuses"
    copy.write_bytes(program("hostile/many_statuses").read_bytes())
    copy.chmod(0o755)
    return copy


@pytest.mark.parametrize(("processes", "each"), [(1, 40_000), (1_200, 30)])
def test_one_users_rows_leave_another_the_totals_and_none_is_lost(calls, processes, each):
    """By ever new statuses, and by ever new processes; all of it between two drains."""
    with DeviceWatch() as watch:
        attacker = Program(calls, processes, each, user=ATTACKER)
        victim = Program(calls, 1, 200, -7, user=VICTIM)
        watch.follow(attacker, "ready")
        watch.follow(victim, "ready")
        watch.drain()
        for program in (attacker, victim):
            program.go()
            program.wait_for("made")
        watch.finish(attacker, victim)
    of = {(key[1], key[3]): count for key, count in watch.calls.items() if count == 100}
    assert of == {("clFinish", -7): 100, ("clFlush", -7): 100}
    losses = watch.collector.losses()
    assert "count_map_full" not in losses
    assert losses["by_process"] > 1_000
    assert sum(watch.calls.values()) == processes * each + 200
    others = [count for key, count in watch.calls.items() if key[:2] == (0, "other")]
    assert sum(others) == losses.get("together", 0)
    assert bool(others) == (processes > 1)


BUDGET = 0.001
LOUD_CALLS = 50_000


def notes_of(watch: DeviceWatch, name: str) -> list[str]:
    """Of this test's program: others may make calls on this machine."""
    return [text for text in watch.notes_of(name) if "of many_statuses" in text]


def run_loud(watch: DeviceWatch, calls: Path) -> tuple[Program, int]:
    """A user's loops, until they are over the budget: the last one, that goes on mapping the file,
    and how many calls they made."""
    for runs in range(1, 50):
        loud = Program(calls, 1, LOUD_CALLS, 0, "hold", user=ATTACKER)
        watch.follow(loud, "ready")
        loud.go()
        watch.follow(loud, "made")
        watch.drain()
        if notes_of(watch, "calls_left_out"):
            return loud, runs * LOUD_CALLS
        loud.go()
    pytest.fail("never over the budget")


def count_of(watch: DeviceWatch, status: int) -> Counter[str]:
    """Of the two functions of this test's program, in all processes."""
    found: Counter[str] = Counter()
    for (_, function, _, of), count in watch.calls.items():
        if of == status and function in {"clFinish", "clFlush"}:
            found[function] += count
    return found


def test_one_users_loop_costs_another_no_call(calls):
    with DeviceWatch(budget=BUDGET) as watch:
        victim = Program(calls, 1, 40, -7, user=VICTIM)
        watch.follow(victim, "ready")
        loud, made = run_loud(watch, calls)
        assert notes_of(watch, "probe_taken_off") == []
        assert all(f"of user {ATTACKER}" in text for text in notes_of(watch, "calls_left_out"))
        more = Program(calls, 1, LOUD_CALLS, 0, user=ATTACKER)
        watch.follow(more, "ready")
        more.go()
        watch.follow(more, "made")  # the victim goes on mapping the file until then
        for program in (victim, loud):
            program.go()
        watch.finish(more, victim, loud)
    assert count_of(watch, -7) == {"clFinish": 20, "clFlush": 20}
    missing = made + LOUD_CALLS - sum(count_of(watch, 0).values())
    assert missing >= LOUD_CALLS / 2  # of one function or of both
    assert missing <= watch.collector.losses()["over_budget"]  # others may be over it, too


def test_a_probe_that_one_user_alone_made_too_dear_is_back_for_another(calls):
    with DeviceWatch(budget=BUDGET) as watch:
        loud, _ = run_loud(watch, calls)
        assert notes_of(watch, "probe_taken_off")
        victim = Program(calls, 1, 40, -7, user=VICTIM)
        watch.follow(victim, "ready")
        victim.go()
        loud.go()
        watch.finish(victim, loud)
    assert count_of(watch, -7) == {"clFinish": 20, "clFlush": 20}
