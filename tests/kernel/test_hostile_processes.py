# SPDX-License-Identifier: Apache-2.0
"""Programs of an unprivileged user that want to end the recorder, or to keep it busy: what they
cost it, and what becomes of the others on the machine."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.bpf

NOBODY, SOMEBODY = 65_534, 65_533
MAPPINGS = 65_000
ABI = Path(__file__).parents[2] / "abi"


@pytest.fixture
def folder(tmp_path_factory):
    """One that everybody may reach and write to."""
    path = tmp_path_factory.mktemp("hostile")
    for part in (path.parent, path.parent.parent):
        part.chmod(0o755)
    path.chmod(0o777)
    return path


@contextmanager
def attacker(command, user=NOBODY):
    """A program of an unprivileged user, once it is ready."""
    process = subprocess.Popen(
        [str(part) for part in command],
        user=user, group=user, extra_groups=[], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def installed(program, folder):
    """A program where an unprivileged user can run it."""

    def install(name, *flags):
        copy = folder / Path(name).name
        copy.write_bytes(program(name, *flags).read_bytes())
        copy.chmod(0o755)
        return copy

    return install


FORGES = """
import ctypes, os, subprocess, sys, time
ctypes.CDLL(None).prctl(15, b"slurmstepd", 0, 0, 0)
step = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0"}
print("ready", flush=True)
while True:
    subprocess.run(["/bin/sleep", "0.04"], env=step)
"""


def test_nobody_bills_what_it_runs_to_a_job_of_slurm(record, folder):
    """By the name of a keeper of steps, its title, and what its children have in their
    environment; while they run, and by the kernel's notes when they are gone."""
    forged = ["/bin/bash", "-c", 'exec -a "slurmstepd: [4711.0]" /usr/bin/python3 -c "$0"', FORGES]
    with record("--host") as recorder, attacker(forged):
        time.sleep(1.5)
    sleeps = [it for it in recorder.session.processes if it.comm == "sleep"]
    assert sleeps
    assert {it.owner.job for it in recorder.session.processes} == {""}


@contextmanager
def measured(record, *flags, **settings):
    """A recording, and then what it cost: seconds of CPU and bytes of memory at the most."""
    with record(*flags, **settings) as recorder:
        status = Path(f"/proc/{recorder.process.pid}/status")
        yield recorder
        recorder.cost_rss_bytes = 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert recorder.end() == 0, recorder.complaints
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        recorder.cost_cpu_s = (after.ru_utime + after.ru_stime) - (
            before.ru_utime + before.ru_stime
        )


def test_a_terminal_under_the_name_of_the_ring_is_not_taken_and_a_hang_up_ends_no_agent(
    installed, folder
):
    hang_up = installed("hostile/hang_up")
    command = [sys.executable, "-m", "sonde", "agent", "--prometheus", "127.0.0.1:0"]
    with attacker([hang_up, folder]) as terminal:
        named = Path(f"/proc/{terminal.pid}/fd/600").readlink()
        assert str(named) == "/memfd:sonde-inject (deleted)"
        agent = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
        assert "metrics at" in agent.stderr.readline()
        time.sleep(1)  # it has looked at all processes by then
        stat = Path(f"/proc/{agent.pid}/stat").read_text().rpartition(")")[2].split()
        agent.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert stat[4] == "0", "it has a terminal"
        assert agent.poll() is None, "the hang-up ended it"
        agent.terminate()
        assert agent.wait(timeout=20) == 0
        agent.stderr.close()


@pytest.mark.parametrize("way", ["still", "storm"])
def test_very_many_mappings_with_long_paths_cost_little(record, installed, folder, way):
    many = installed("hostile/many_mappings")
    command = [many, folder, MAPPINGS, *(["storm"] if way == "storm" else [])]
    with attacker(command) as hostile:
        began_s = time.monotonic()
        with measured(record, device=True) as recorder:
            time.sleep(2)
        took_s = time.monotonic() - began_s
        assert Path(f"/proc/{hostile.pid}/maps").exists()
    assert recorder.cost_rss_bytes < 150 << 20
    assert recorder.cost_cpu_s < 6, "a minute before"
    assert took_s < 20
    if way == "storm":
        ((cut,),) = recorder.rows(
            "SELECT count(*) FROM event WHERE kind = 'loss' AND name = 'processes.events'"
        )
        assert cut, "what was not read is reported"


def test_twenty_hostile_rings_take_nothing_from_an_honest_one(record, installed, folder):
    fake = installed("hostile/fake_ring", f"-I{ABI}")
    library = folder / "sonde-inject-0.so"
    library.write_bytes(bytes(4096))
    library.chmod(0o755)
    rate = 200
    with ExitStack() as stack:
        hostile = {stack.enter_context(attacker([fake, library, 0])).pid for _ in range(20)}
        honest = stack.enter_context(attacker([fake, library, rate], user=SOMEBODY)).pid
        with measured(record, device=True) as recorder:
            time.sleep(4)
    info = recorder.info
    rows = dict(recorder.rows("SELECT pid, count(*) FROM device_run GROUP BY pid"))
    assert rows[honest] >= rate * (info.duration_ns / 1e9 - 1)
    assert recorder.cost_rss_bytes < 300 << 20
    assert recorder.cost_cpu_s < 6
    assert sum(rows.values()) - rows[honest] < 20 * 4_096 + 16_384 * (info.duration_ns / 1e9 + 2)
    named = {
        pid for (pid,) in recorder.rows("SELECT pid FROM event WHERE name = 'device_time_lost'")
    }
    assert named
    assert named <= hostile
    assert recorder.losses().keys() & {"device_time.names_left_out", "device_time.stacks_left_out"}


def test_a_ring_of_a_process_without_the_library_is_left_alone(record, installed, folder):
    fake = installed("hostile/fake_ring", f"-I{ABI}")
    other = folder / "other.so"
    other.write_bytes(bytes(4096))
    other.chmod(0o755)
    with attacker([fake, other, 200]) as hostile, record(device=True) as recorder:
        time.sleep(1)
        recorder.end()
    assert recorder.rows("SELECT * FROM device_run WHERE pid = ?", hostile.pid) == []


def test_a_process_that_keeps_its_memory_map_locked_delays_nobody(installed, folder, tmp_path):
    """Before its reads went through a child, a recording of 3 s took as long as the attacker liked,
    whether it was there from the start or came later."""
    hog = installed("hostile/map_lock")
    path = tmp_path / "x.sonde"

    def sonde(*arguments):
        command = [sys.executable, "-m", "sonde", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=40, check=True)

    with attacker([hog, 3, 300, 30]) as locked:
        outcome = json.loads(sonde("record", "-d", "2", "--json", "-o", str(path)).stdout)
        assert outcome["elapsed_s"] < 6
        assert "processes.hung" in sonde("report", str(path), "--format", "table").stdout
        assert "left out: 1 process" in sonde("dump", str(locked.pid)).stdout


def test_a_memory_map_locked_in_the_middle_delays_nobody(installed, folder, tmp_path):
    hog = installed("hostile/map_lock")
    command = [sys.executable, "-m", "sonde", "record", "-d", "5", "--json"]
    recorder = subprocess.Popen(
        [*command, "-o", str(tmp_path / "x.sonde")], stdout=subprocess.PIPE, text=True
    )
    try:
        time.sleep(4)
        with attacker([hog, 3, 300, 30]):
            outcome = json.loads(recorder.communicate(timeout=30)[0])
        assert 5 <= outcome["elapsed_s"] < 9
    finally:
        recorder.kill()


def test_an_agent_turns_beside_a_locked_memory_map(installed, folder):
    hog = installed("hostile/map_lock")
    command = [sys.executable, "-m", "sonde", "agent", "--prometheus", "127.0.0.1:0"]
    agent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url = agent.stderr.readline().split()[-1]
        with attacker([hog, 3, 300, 30]):
            ages = []
            for _ in range(4):
                time.sleep(2)
                with urllib.request.urlopen(url, timeout=10) as page:
                    lines = page.read().decode().split("\n")
                ages += [
                    float(line.split()[1])
                    for line in lines
                    if line.startswith("sonde_agent_loop_age_seconds ")
                ]
            assert len(ages) == 4
            assert max(ages) < 8
            agent.send_signal(signal.SIGTERM)
            assert agent.wait(20) == 0
    finally:
        agent.kill()
        agent.wait()
