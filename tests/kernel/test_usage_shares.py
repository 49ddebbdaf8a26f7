# SPDX-License-Identifier: Apache-2.0
"""Rows of `usage` where a user has more processes than there is room for."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from sonde.collect import tasks
from sonde.collect.kernel import Kernel
from sonde.collect.tasks import TaskCollector

pytestmark = pytest.mark.bpf

ROOM = 512
MANY = 600
OLD_S = 2.2
"""Younger processes have a share of another kind (bpf/young_rows.h)."""

SLEEPERS = f"""
import os, time
first = os.getpid()
for _ in range({MANY}):
    if not os.fork():
        while os.getppid() == first:
            time.sleep(0.05)
        os._exit(0)
print("ready", flush=True)
time.sleep(600)
"""
SPINNER = """
import time
print("ready", flush=True)
while True:
    sum(range(10_000))
    time.sleep(0.005)
"""


def start(code: str, user: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code]
    if not Path(sys.executable).resolve().is_relative_to("/usr"):
        command[0] = "/usr/bin/python3"
    process = subprocess.Popen(
        command, user=user, group=user, extra_groups=[], cwd="/", text=True,
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


def test_a_user_of_many_processes_takes_no_row_of_another_user(monkeypatch):
    monkeypatch.setattr(tasks, "_room", lambda: ROOM)
    collector = TaskCollector(Kernel(None))
    hostile = start(SLEEPERS, 65_534)
    victim = start(SPINNER, 65_533)  # a scan comes to it last
    try:
        time.sleep(OLD_S)
        collector.start()
        seen, together = [], 0
        for _ in range(4):
            time.sleep(1.1)
            rows = collector.drain(0, to_the_end=True).rows["usage"]
            seen.append([row[1] for row in rows].count(victim.pid))
            together += sum(row[3] for row in rows if not row[1])
        assert seen == [1, 1, 1, 1], "each second has a row of it"
        assert together > 0, "what the others used is counted, in one row"
    finally:
        collector.stop()
        for process in (hostile, victim):
            subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
            process.wait()
