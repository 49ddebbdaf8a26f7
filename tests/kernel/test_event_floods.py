# SPDX-License-Identifier: Apache-2.0
"""A user's flood of process events: what it costs the recorder, and what becomes of the events of
others."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sonde import _native, procfs
from sonde.collect.kernel import Kernel
from sonde.collect.tasks import TaskCollector
from sonde.collect.waits import WaitCollector

pytestmark = pytest.mark.bpf

NOBODY, SOMEBODY = 65_534, 65_533
RUNS = 60
EVENT_S = 100e-6
"""What handling an event costs, as the stream is to take it here."""

STARTS = f"""
import os, sys, time
print("ready", flush=True)
sys.stdin.readline()
for n in range({RUNS}):
    pid = os.posix_spawn("/bin/sleep", ["sleep", "0.04"], {{}})
    print(pid, flush=True)
    os.waitpid(pid, 0)
"""


@pytest.fixture
def flood(program, tmp_path):
    """Starts a flood of a kind, as nobody."""
    started = []
    copy = tmp_path / "event_flood"
    copy.write_bytes(program("hostile/event_flood").read_bytes())
    copy.chmod(0o755)
    for part in (tmp_path, *tmp_path.parents[:2]):
        part.chmod(0o755)

    def start(way):
        process = subprocess.Popen(
            [copy, way], user=NOBODY, group=NOBODY, extra_groups=[], stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def victim_runs():
    """Pids of programs that another user has started one after the other."""
    command = [sys.executable, "-c", STARTS]
    if not Path(sys.executable).resolve().is_relative_to("/usr"):
        command[0] = "/usr/bin/python3"
    done = subprocess.run(
        command, user=SOMEBODY, group=SOMEBODY, extra_groups=[], input="\n",
        capture_output=True, text=True, check=True, cwd="/", timeout=60,
    )  # fmt: skip
    return {int(line) for line in done.stdout.split()[1:]}


ROWS_OF_ONE = 256
"""young_rows_of_one (bpf/young_rows.h)."""
WINDOW_S = 1.074


def test_rows_of_short_processes_are_shared_and_others_have_theirs(flood):
    """Collectors of the whole machine, drained once a second as a recorder drains them."""
    kernel = Kernel(None)
    tasks, waits = (
        TaskCollector(kernel),
        WaitCollector(kernel, span_min_ns=10**7, stack_gap_ns=10**7),
    )
    used, waited, rest_ns = set(), set(), {"usage": 0, "activity": 0}
    tasks.start()
    waits.start()
    try:
        hostile = flood("fork")
        began_s = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            victim = pool.submit(victim_runs)
            while not victim.done() or time.monotonic() < began_s + 3:
                time.sleep(1)
                usage = tasks.drain(0, False).rows["usage"]
                activity = waits.drain(0, False).rows.get("activity", [])
                used |= {row[1] for row in usage}
                waited |= {row[7] for row in activity}
                rest_ns["usage"] += sum(row[3] for row in usage if not row[1])
                rest_ns["activity"] += sum(row[11] for row in activity if not row[7])
        took_s = time.monotonic() - began_s
    finally:
        tasks.stop()
        waits.stop()
    pids = victim.result()
    assert len(pids & used) == len(pids & waited) == RUNS
    assert hostile.pid in used
    most = ROWS_OF_ONE * (took_s / WINDOW_S + 2) + 200  # 200: what else the machine runs
    assert len(used - pids) < most
    assert len(waited - pids) < most
    assert tasks.losses()["together"] > most, "or the flood was none"
    assert waits.losses()["together"] > most
    assert rest_ns["usage"] > 0.1e9
    assert rest_ns["activity"] > 0.1e9


@pytest.mark.parametrize("way", ["map", "fork"])
def test_a_flood_of_one_user_takes_no_event_of_another(flood, way):
    events = _native.ProcessEvents(procfs.party_of)
    hostile = flood(way)
    seen = {"born": set(), "executes": set(), "ends": set()}
    handed = 0
    with ThreadPoolExecutor(1) as pool:
        victim = pool.submit(victim_runs)
        until_s = time.monotonic() + 30
        while time.monotonic() < until_s:
            if victim.done():
                until_s = min(until_s, time.monotonic() + 0.2)
            events.wait(100)
            found = events.drain()
            events.charge(len(found) * EVENT_S)
            handed += len(found)
            for event in found:
                if isinstance(event, _native.ForkEvent):
                    seen["born"].add(event.pid)
                elif isinstance(event, _native.CommEvent) and event.is_exec:
                    seen["executes"].add(event.pid)
                elif isinstance(event, _native.ExitEvent) and event.pid == event.tid:
                    seen["ends"].add(event.pid)
            time.sleep(0.02)
    pids = victim.result()
    assert len(pids) == RUNS
    missing = {what: len(pids - those) for what, those in seen.items()}
    assert missing == {"born": 0, "executes": 0, "ends": 0}
    party, pid, count = events.take_left_out()[0]
    assert (party, pid) == (NOBODY, hostile.pid)
    assert count > handed / 2, "most of the flood is not handed on"


@pytest.mark.parametrize(("way", "most"), [("map", 0.4), ("fork", 0.6)])
def test_a_flood_costs_the_recorder_a_part_of_a_core_and_is_named(record, flood, way, most):
    with record("--host") as recorder:
        stat = Path(f"/proc/{recorder.process.pid}/stat")
        hostile = flood(way)
        time.sleep(10)  # what its user may take at once is used up
        before = stat.read_text().rpartition(")")[2].split()[11:13]
        began_s = time.monotonic()
        time.sleep(4)
        took_s = time.monotonic() - began_s
        after = stat.read_text().rpartition(")")[2].split()[11:13]
    cost = (sum(map(int, after)) - sum(map(int, before))) / 100 / took_s
    assert cost < most, "a generous bound, for a noisy machine"
    assert recorder.losses()["processes.events"]
    notices = recorder.rows(
        "SELECT pid, text FROM event WHERE name = 'process_events_left_out' ORDER BY value DESC"
    )
    pid, text = notices[0]
    assert f"user {NOBODY}" in text
    assert pid == hostile.pid
