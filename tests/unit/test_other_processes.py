# SPDX-License-Identifier: Apache-2.0
"""Who else had the CPUs while chosen processes were recorded, and what of them is named."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from sonde import procfs
from sonde.agent import other_processes
from sonde.agent.other_processes import NAMED, OtherProcesses
from sonde.agent.scheduling import scheduling_rows

SECOND = 1_000_000_000
ME, RECORDED = os.getpid(), 100


def stat(ppid: int = 1, cpu_s: float = 0.0, children_s: float = 0.0, start: int = 1) -> procfs.Stat:
    times = {"cpu_ns": int(cpu_s * SECOND), "children_ns": int(children_s * SECOND)}
    return procfs.Stat("worker", "S", ppid, start, resident_bytes=0, start_code=1, **times)


class Machine:
    """Processes and their owners, as /proc would show them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks: list[Mapping[int, procfs.Stat]] = []
        self.uids: dict[int, int] = {}
        monkeypatch.setattr(other_processes, "_look", lambda: self.looks.pop(0))
        monkeypatch.setattr(procfs, "user_ids", lambda pid: (self.uids.get(pid, 1001),) * 4)
        self.runs: dict[int, str] = {}
        monkeypatch.setattr(
            procfs,
            "commands_of",
            lambda pids: [self.runs.get(pid, f"worker run{pid}.py …") for pid in pids],
        )

    def used(self, *looks: Mapping[int, procfs.Stat]) -> dict[str, float]:
        self.looks += looks
        others = OtherProcesses([RECORDED])
        others.begin()
        rows = others.rows(5)
        assert rows == sorted(rows, key=lambda row: -row.value)
        return {row.text: row.value / SECOND for row in rows}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_those_of_the_same_user_are_named_others_by_their_class(machine: Machine) -> None:
    pids = (RECORDED, 200, 300, 400, 500)
    machine.uids = {300: 0, 400: 33, 500: 1002}
    before = {pid: stat(cpu_s=5) for pid in pids} | {600: stat(2)}
    now = {pid: stat(cpu_s=5 + pid / 100) for pid in pids} | {600: stat(2, cpu_s=0.5)}

    assert machine.used(before, now) == {
        "processes of other users": 5.0,
        "processes of system accounts": 4.0,
        "processes of root": 3.0,
        "worker run200.py … (200)": 2.0,
        "threads of the kernel": 0.5,
    }


def test_what_is_recorded_and_what_it_starts_is_left_out_and_the_recorder_is_one(
    machine: Machine,
) -> None:
    now = {
        RECORDED: stat(cpu_s=3), 101: stat(RECORDED, cpu_s=2), 102: stat(101, cpu_s=1),
        ME: stat(cpu_s=0.5), ME + 1: stat(ME, cpu_s=0.25),
    }  # fmt: skip
    before = dict.fromkeys((RECORDED, ME), stat())

    assert machine.used(before, now) == {"this recorder": 0.75}


def test_children_that_came_and_went_count_for_who_started_them(machine: Machine) -> None:
    """One of them had used 4 s before the recording."""
    before = {200: stat(cpu_s=1, children_s=10), 201: stat(200, cpu_s=4)}
    now = {200: stat(cpu_s=1.5, children_s=10 + 4 + 3)}

    assert machine.used(before, now) == {"worker run200.py … (200) and what it started": 3.5}


def test_a_pid_that_was_used_again_is_another_process(machine: Machine) -> None:
    used = machine.used({200: stat(cpu_s=50)}, {200: stat(cpu_s=2, start=9)})
    assert used == {"worker run200.py … (200)": 2.0}


def test_few_are_named_and_none_is_lost(machine: Machine) -> None:
    now = {pid: stat(cpu_s=1 + pid / 1e6) for pid in range(1000, 1400)}
    now |= {pid: stat(cpu_s=0.01) for pid in range(2000, 2100)}
    used = machine.used({}, now)

    assert sum("worker" in text for text in used) == NAMED
    assert sum(used.values()) == pytest.approx(401 + sum(range(1000, 1400)) / 1e6, abs=0.1)
    assert len(used) <= NAMED + 6


def test_processes_of_one_program_are_one_group(machine: Machine) -> None:
    """Each of many that come and go has less than one that stays: together they have most."""
    machine.runs = dict.fromkeys(range(1000, 1020), "python -m pytest …") | {200: "train.py"}
    now = {pid: stat(cpu_s=0.5) for pid in range(1000, 1020)} | {200: stat(cpu_s=3)}
    used = machine.used({}, now)

    assert used == {"python -m pytest … (20 processes)": 10.0, "train.py (200)": 3.0}
    assert next(iter(used)).startswith("python -m pytest")


def test_how_the_kernel_gives_a_process_cpus_is_noted() -> None:
    def lessen() -> None:
        os.nice(5)
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])

    with subprocess.Popen(["sleep", "60"], preexec_fn=lessen) as process:
        rows = scheduling_rows([process.pid, 1 << 22], 5)
        process.kill()

    assert {(row.pid, row.name, row.value) for row in rows} == {
        (process.pid, "nice", float(os.getpriority(os.PRIO_PROCESS, 0) + 5)),
        (process.pid, "cpus_allowed", 1.0),
    }


def test_a_machine_with_too_many_processes_is_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(procfs, "pids", lambda: list(range(other_processes.MAX_PROCESSES + 1)))
    others = OtherProcesses([RECORDED])
    others.begin()
    assert others.rows(5) == []


def test_a_real_process_is_counted_and_its_arguments_are_not_shown(tmp_path: Path) -> None:
    """It is a child of this process, which stands for the recorder here."""
    script = tmp_path / "spin_here.py"
    script.write_text("while True: pass")
    others = OtherProcesses([1 << 22])
    others.begin()
    with subprocess.Popen([sys.executable, script, "--password", "hunter2"]) as process:
        until_s = time.monotonic() + 30
        while time.monotonic() < until_s and procfs.read_stat(process.pid).cpu_ns < 3e8:
            time.sleep(0.05)
        rows = others.rows(5)
        process.kill()

    assert any(row.text == other_processes.RECORDER and row.value > 1e8 for row in rows)
    assert not any("hunter2" in row.text for row in rows)
