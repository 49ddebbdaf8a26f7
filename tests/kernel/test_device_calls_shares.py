# SPDX-License-Identifier: Apache-2.0
"""Rows of device calls that one user fills: what becomes of the totals of another."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_watch import DeviceWatch, Told

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
        attacker = Told(calls, processes, each, user=ATTACKER)
        victim = Told(calls, 1, 200, -7, user=VICTIM)
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
