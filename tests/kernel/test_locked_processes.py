# SPDX-License-Identifier: Apache-2.0
"""A user keeps the folder of a process of theirs in /proc locked (folder_locks.py), so that who
looks up a name there for the first time waits, and no signal ends that: nothing of ours does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from folder_locks import locked

import units
from sonde import procfs

LIMIT_S = 20
RECORD_S = 60
"""For a recording: the first one of a machine takes its time where it is busy."""
UNIT_S = 15
"""With the manager that applies the unit."""
USER = 31_337
UNPRIVILEGED = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
"""Without CAP_SYS_ADMIN nothing can be mounted."""
BOTH = pytest.mark.parametrize("before", [(), UNPRIVILEGED], ids=["", "unprivileged"])
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="starts processes of another user")


@contextmanager
def sleeper(user: int) -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"], user=user, group=user) as child:
        try:
            yield child.pid
        finally:
            child.kill()


@pytest.fixture
def held() -> Iterator[int]:
    """A process of a user, whose folder is locked before anybody looked a name up there."""
    with sleeper(USER) as pid, locked(Path(f"/proc/{pid}")):
        yield pid


def in_time(program: str, *arguments: str, before: Sequence[str] = ()) -> tuple[list[str], float]:
    """What a program prints, and how long it took in s; one that hangs is left behind."""
    began_s = time.monotonic()
    child = subprocess.Popen(
        [*before, sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        output, _ = child.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        pytest.fail(f"it hangs:\n{Path(f'/proc/{child.pid}/stack').read_text()}")
    assert child.returncode == 0
    return output.splitlines(), time.monotonic() - began_s


def sonde(*arguments: str) -> None:
    child = subprocess.Popen([sys.executable, "-m", "sonde", *arguments], stdout=subprocess.DEVNULL)
    try:
        assert child.wait(RECORD_S) == 0
    except subprocess.TimeoutExpired:
        child.kill()
        pytest.fail(f"it hangs:\n{Path(f'/proc/{child.pid}/stack').read_text()}")


READ = """
import sys, time
from sonde import procfs
pid = int(sys.argv[1])
status, comm = procfs.read_file(f"/proc/{pid}/status"), procfs.read_comm(pid, pid)
print(bool(status), comm, procfs.tids(pid) == {pid})
stat = procfs.read_stat(pid)
print(procfs.party_of(pid), procfs.is_there(f"/proc/{pid}/stat"), stat and stat.comm)
time.sleep(0.5)
procfs.BROKER.abandoned.may_refuse()
print(procfs.BROKER.patience.processes_hung, len(procfs.BROKER.abandoned))
"""


def test_it_is_read_like_others(held: int) -> None:
    """We have an instance of procfs that its user does not see."""
    lines, took_s = in_time(READ, str(held))
    assert lines == ["True sleep True", f"{USER} True sleep", "0 0"]
    assert took_s < 3


def test_native_code_waits_for_nobody_either(held: int) -> None:
    program = """
import sys
from sonde import _native, procfs
procfs.pids()
print(_native.build_id(f"/proc/{sys.argv[1]}/exe") == _native.build_id("/usr/bin/sleep") != "")
"""
    lines, took_s = in_time(program, str(held))
    assert lines == ["True"]
    assert took_s < 3


def test_without_a_privilege_every_read_of_it_ends_and_its_user_pays(held: int) -> None:
    (first, second, third), took_s = in_time(READ, str(held), before=UNPRIVILEGED)
    assert first == "False None False"
    assert second == f"{USER} True None"
    hung, abandoned = map(int, third.split())
    assert hung >= 1
    assert abandoned == 0  # its wait began with a listing, which SIGKILL ends
    assert took_s < 3


OTHERS = """
import sys
from sonde import procfs
held, other = map(int, sys.argv[1:])
stat = procfs.read_stat(held)
print(stat and stat.comm, procfs.party_of(other), procfs.read_comm(other, other))
print([it.comm if it else None for it in procfs.read_stats([held, other])], other in procfs.pids())
"""


@pytest.mark.skipif(not units.can_run(), reason="needs systemd")
@pytest.mark.parametrize("unit", ["sonde.service", "sonde-metrics.service"])
def test_under_a_unit_it_is_read_like_others(held: int, unit: str) -> None:
    """Its /proc is an instance that its user does not see."""
    folder = Path(tempfile.mkdtemp(prefix="sonde-test-", dir="/var/lib"))
    try:
        before = units.under(unit, folder, {}, daemon=False)
        lines, took_s = in_time(READ, str(held), before=before)
    finally:
        folder.rmdir()
    assert lines == ["True sleep True", f"{USER} True sleep", "0 0"]
    assert took_s < UNIT_S


@BOTH
def test_processes_of_others_are_read(held: int, before: Sequence[str]) -> None:
    with sleeper(USER + 1) as other:
        lines, took_s = in_time(OTHERS, str(held), str(other), before=before)
    it = None if before else "sleep"
    assert lines == [f"{it} {USER + 1} sleep", f"[{it!r}, 'sleep'] True"]
    assert took_s < 3


MANY = """
import sys, time
from sonde import procfs
began_s = time.monotonic()
for pid in map(int, sys.argv[1:]):
    procfs.read_file(f"/proc/{pid}/cgroup")
print(time.monotonic() - began_s)
"""


@BOTH
def test_many_of_one_user_cost_what_one_user_may(before: Sequence[str]) -> None:
    with sleeper(USER) as a, sleeper(USER) as b, sleeper(USER) as c, sleeper(USER) as d:
        pids = [a, b, c, d]
        with locked(*(Path(f"/proc/{pid}") for pid in pids)):
            lines, _ = in_time(MANY, *map(str, pids), before=before)
    assert float(lines[0]) < 3


def test_a_look_up_in_a_wait_is_refused_not_mixed_up(held: int) -> None:
    """Who pays for a wait is looked up while the answer is still to come."""
    program = """
import sys
from sonde import procfs
held, *others = map(int, sys.argv[1:])
print([procfs.read_link(f"/proc/{pid}/exe").rpartition("/")[2] for pid in others])
print([it and it.comm for it in procfs.read_stats([held, *others])])
print([procfs.party_of(pid) for pid in others])
"""
    with sleeper(USER + 1) as a, sleeper(USER + 2) as b:
        lines, _ = in_time(program, str(held), str(a), str(b), before=UNPRIVILEGED)
    assert lines == [
        "['sleep', 'sleep']", "[None, 'sleep', 'sleep']", f"[{USER + 1}, {USER + 2}]"
    ]  # fmt: skip


@pytest.mark.parametrize("whole", [False, True])
def test_others_are_recorded(held: int, whole: bool, tmp_path: Path) -> None:
    assert held
    with sleeper(USER + 1) as other:
        which = [] if whole else ["-p", str(other)]
        sonde("record", *which, "-d", "1", "-o", str(tmp_path / "x.sonde"))


def test_an_agent_goes_on_and_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as output:
        agent = subprocess.Popen(
            [sys.executable, "-m", "sonde", "agent", "--prometheus", "127.0.0.1:0", "--no-device"],
            stdout=subprocess.DEVNULL, stderr=output,
        )  # fmt: skip
    try:
        until_s = time.monotonic() + LIMIT_S
        while "metrics at" not in log.read_text():
            assert time.monotonic() < until_s
            time.sleep(0.05)
        with sleeper(USER) as pid, locked(Path(f"/proc/{pid}"), Path(f"/proc/{agent.pid}")):
            time.sleep(6)
            tasks = [f"/proc/{agent.pid}/task/{tid}/stat" for tid in procfs.tids(agent.pid)]
            asleep = [(procfs.read_file(it) or b"").rpartition(b") ")[2][:1] for it in tasks]
            agent.send_signal(signal.SIGTERM)
            assert agent.wait(LIMIT_S) == 0
        assert asleep
        assert b"D" not in asleep
    finally:
        agent.kill()
        agent.wait(LIMIT_S)
