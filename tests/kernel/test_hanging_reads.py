# SPDX-License-Identifier: Apache-2.0
"""An unprivileged user serves FUSE in a user namespace of his own and stops answering."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fuse_tenants import ANOTHER, Tenant, tenant

from sonde import procfs
from sonde.agent.attaching import Attacher
from sonde.attach.policy import Policy, ProcessFacts
from sonde.collect.inject_memory import InjectMemory
from sonde.collect.slots import slots_asked
from sonde.procfs.patience import MAX_ABANDONED_OF_PARTY

LIMIT_S = 45
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="makes a device and acts as other users"),
]


@pytest.fixture(params=["exec", "elf"])
def hostile(request: pytest.FixtureRequest) -> Iterator[Tenant]:
    """`exec`: a process whose locks are held for ever; `elf`: one whose program hangs readers."""
    with tenant(request.param) as found:
        yield found


@pytest.fixture
def broker() -> Iterator[procfs.Broker]:
    """That of this process, as new, before and after: agents in this process count its losses."""
    procfs.BROKER.patience.reset()
    yield procfs.BROKER
    procfs.BROKER.close()
    procfs.BROKER.patience.reset()


def _sonde(*arguments: str) -> subprocess.CompletedProcess[str]:
    """With output to files: a child that cannot die must hold no pipe of ours."""
    return subprocess.run(
        [sys.executable, "-m", "sonde", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_a_recording_ends_in_time_and_counts_what_hung(hostile: Tenant, tmp_path: Path) -> None:
    path = tmp_path / "x.sonde"
    done = _sonde("record", "-d", "2", "-o", str(path))
    assert done.returncode == 0, done.stderr
    output = _sonde("report", str(path), "--format", "table").stdout + done.stdout
    assert ("processes.hung" if hostile.mode == "exec" else "files.hung") in output


def test_top_and_a_dump_of_a_neighbour_end_in_time(hostile: Tenant) -> None:
    neighbour = subprocess.Popen(["/bin/dash", "-c", "while :; do :; done"])
    try:
        dumped = _sonde("dump", str(neighbour.pid))
        assert "[dash]" in dumped.stdout
        top = _sonde("top", "--once").stdout
        assert "dash" in top
        if hostile.mode == "exec":
            assert "left out: 1 process: a read" in top
    finally:
        neighbour.kill()
        neighbour.wait()


@pytest.mark.usefixtures("hostile")
def test_an_agent_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sonde", "agent", "--prometheus", "127.0.0.1:0"]
    log = tmp_path / "agent.log"
    with log.open("w") as output:
        agent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=output)
    until_s = time.monotonic() + LIMIT_S
    while "metrics at" not in log.read_text():
        assert time.monotonic() < until_s, log.read_text()
        time.sleep(0.05)
    time.sleep(2)  # it has looked at all processes by then
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(20) == 0


def test_files_of_a_server_that_died_are_counted_as_unread(tmp_path: Path) -> None:
    """What is read of them is ENOTCONN, whatever was to be known."""
    path = tmp_path / "x.sonde"
    with tenant("dead") as dead:
        pid = str(dead.kid)
        commands = (
            ("record", "-d", "2", "-p", pid, "-o", str(path)),
            ("dump", pid),
            ("explain", "--pid", pid, "--duration", "2"),
        )
        with ThreadPoolExecutor() as pool:
            recorded, dumped, explained = pool.map(lambda words: _sonde(*words), commands)
    assert recorded.returncode == 0, recorded.stderr
    assert dumped.returncode == 0, dumped.stderr
    for done in (recorded, dumped, explained):
        assert "a bug in Sonde" not in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("mode", ["exec", "elf", "mmap"])
def test_a_dump_of_the_hostile_process_ends_in_time_and_names_what_is_missing(mode: str) -> None:
    """`mmap`: the kernel's walk itself waits for the process's map."""
    with tenant(mode) as hostile:
        began_s = time.monotonic()
        done = _sonde("dump", str(hostile.kid))
        assert time.monotonic() - began_s < 20
    assert done.returncode in (0, 1), done.stderr
    assert "a bug in Sonde" not in done.stderr
    assert "left out: " in done.stdout or done.returncode == 1


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the tenant's code is for x86-64")
def test_a_dump_of_a_stack_that_makes_its_readers_wait_leaves_nothing_behind() -> None:
    """Nor is anything left in the kernel that others wait for who remove programs."""
    with tenant("stack") as waits:
        before = set(_without_an_end())
        done = _sonde("dump", str(waits.kid))
        assert done.returncode == 0, done.stderr
        assert "left out: 1 process: a read of them did not end in time" in done.stdout
        assert set(_without_an_end()) - before == set()


def _without_an_end() -> list[int]:
    """Children of Sonde's that were left by who started them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if b"sonde" in command and b"dump" in command:
                found.append(int(folder.name))
    return found


def test_an_attach_to_a_process_whose_memory_waits_ends_in_time() -> None:
    with tenant("libc") as waits:
        began_s = time.monotonic()
        done = _sonde("attach", str(waits.kid))
        assert done.returncode != 0
        assert "a bug in Sonde" not in done.stderr
        assert time.monotonic() - began_s < 25


@pytest.mark.parametrize("mode", ["exec", "mmap", "libc"])
def test_whether_a_process_may_be_attached_to_is_decided_at_once(
    mode: str, broker: procfs.Broker
) -> None:
    """In the thread that reads out rows; who keeps its environment from us is left alone."""
    with tenant(mode) as waits:
        attacher = Attacher(Policy("all"), load=lambda *_: None)
        began_s = time.monotonic()
        attacher.consider(waits.kid)
        facts = ProcessFacts.of(waits.kid)
        assert time.monotonic() - began_s < 2
        assert Policy("all").allows(facts) == (mode == "libc")
        assert len(attacher._waiting) == (mode == "libc")


def test_memory_of_the_library_that_its_process_keeps_locked_is_given_up(
    broker: procfs.Broker,
) -> None:
    with tenant("write") as locks:
        memory = InjectMemory(os.open(f"/proc/{locks.kid}/fd/700", os.O_RDWR), locks.kid, 0)
        with memory:
            for _ in range(2):
                began_s = time.monotonic()
                with pytest.raises(procfs.Hung):
                    memory.ask(request=1)
                assert time.monotonic() - began_s < 1


def test_whether_memory_may_be_read_for_slots_is_known_at_once(broker: procfs.Broker) -> None:
    """In a child of ours, so that a failure of this does not hang the suite."""
    assert slots_asked(os.getppid())
    with tenant("exec") as locks:
        child = subprocess.Popen(
            [
                *(sys.executable, "-c"),
                "import sys; from sonde.collect.slots import slots_asked\n"
                "print(int(slots_asked(int(sys.argv[1]))))",
                str(locks.kid),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.communicate(timeout=8)[0] == "0\n"
        finally:
            child.kill()


def test_one_user_costs_nobody_else_any_file(broker: procfs.Broker) -> None:
    """Children that cannot be killed are few for each user; what cannot wait is opened still."""
    neighbour = subprocess.Popen(["sleep", "60"], user=ANOTHER, group=ANOTHER, extra_groups=[])
    with tenant("elf") as hostile:
        program = _mapped(hostile.kid, "/f")
        lost = []
        for _ in range(MAX_ABANDONED_OF_PARTY + 2):
            broker.patience.ask_again()
            assert procfs.open_stable(program, copy_bytes=1 << 20) is None
            lost.append(len(broker.abandoned))
        assert lost == [1, 2, 2, 2]
        assert broker.patience.files_hung == len(lost)
        broker.patience.ask_again()
        opened = [
            procfs.open_regular(_mapped(hostile.kid, "/libc.so.6")),
            procfs.open_regular(_mapped(neighbour.pid, "/sleep")),
            procfs.open_regular("/bin/sleep", follow=True, who=neighbour.pid),
        ]
        assert None not in opened
        for fd in opened:
            os.close(fd)
    neighbour.kill()
    neighbour.wait()


def _mapped(pid: int, name: str) -> str:
    """The way to a file through a mapping of it."""
    lines = (procfs.read_maps(pid) or b"").decode().split("\n")
    span = next(line.split()[0] for line in lines if line.endswith(name))
    return f"/proc/{pid}/map_files/{span}"
