# SPDX-License-Identifier: Apache-2.0
"""`sonde attach` and `sonde detach` on live processes, with Sonde's own library."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench import storms

from sonde._native import MmapEvent, ProcessEvent
from sonde.agent.attaching import Attacher
from sonde.attach import library, remote
from sonde.attach.policy import Policy
from sonde.collect import inject_abi as abi
from sonde.collect.device_time import DeviceTime
from sonde.collect.inject_memory import InjectMemory
from sonde.errors import TracerFailed

pytestmark = [
    pytest.mark.skipif(
        os.geteuid() != 0 or os.uname().machine != "x86_64", reason="needs root on x86-64"
    ),
]
SLEEPS = "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.02)"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    """A Python program that sleeps; it must run on through whatever a test does."""
    it = subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE, text=True)
    assert it.stdout is not None
    it.stdout.readline()
    yield it
    assert it.poll() is None
    it.kill()
    it.wait()


def sonde(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sonde", *arguments], capture_output=True, text=True
    )


def attached(pid: int) -> dict[str, object]:
    done = sonde("attach", "--json", str(pid))
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_attach_detach_and_again_load_once(sleeper: subprocess.Popen[str]) -> None:
    first = attached(sleeper.pid)
    assert first["loaded"]
    assert first["state"] in ("idle", "waiting")
    assert sonde("detach", str(sleeper.pid)).stdout == f"process {sleeper.pid}: left\n"
    again = attached(sleeper.pid)

    assert not again["loaded"]
    assert again["state"] in ("idle", "waiting")  # waiting: some recorder of this machine beats
    assert Path(f"/proc/{sleeper.pid}/maps").read_text().count("memfd:sonde-inject") == 1


def test_the_kill_switch_holds_for_good(sleeper: subprocess.Popen[str]) -> None:
    attached(sleeper.pid)
    done = sonde("detach", "--for-good", "--json", str(sleeper.pid))
    assert json.loads(done.stdout) == [{"pid": sleeper.pid, "state": "killed"}]

    refused = sonde("attach", str(sleeper.pid))
    assert refused.returncode == 3
    assert "for good" in refused.stderr


def test_people_read_what_was_done(sleeper: subprocess.Popen[str]) -> None:
    done = sonde("attach", str(sleeper.pid))

    assert f"process {sleeper.pid} has the library; thread {sleeper.pid}" in done.stdout
    assert f"sonde record -p {sleeper.pid}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "cause"),
    [
        (["attach", "99999999"], 2, "there is no process 99999999"),
        (["attach", "x"], 2, "no process that runs is called x"),
        (["attach", "1", "--wait", "0"], 2, "not a number of seconds"),
        (["detach", "99999999"], 2, "there is no process 99999999"),
        (["detach"], 2, "name processes, or --all"),
        (["detach", str(os.getpid())], 2, "does not have the library"),
    ],
)
def test_wrong_use(arguments: list[str], code: int, cause: str) -> None:
    done = sonde(*arguments)

    assert (done.returncode, cause in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


def test_a_stopped_process_is_refused(sleeper: subprocess.Popen[str]) -> None:
    sleeper.send_signal(signal.SIGSTOP)
    time.sleep(0.05)
    done = sonde("attach", str(sleeper.pid))
    sleeper.send_signal(signal.SIGCONT)

    assert done.returncode == 3
    assert f"remedy: Let it run: kill -CONT {sleeper.pid}" in done.stderr


@pytest.mark.parametrize("mode", ["fork", "all"])
def test_the_library_itself_is_loaded_in_a_storm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    storms.build(tmp_path)
    monkeypatch.setattr(storms, "PER_PROCESS", 1)
    (tmp_path / "payload.so").unlink()
    (tmp_path / "payload.so").symlink_to(library.path())

    row = storms.storm(tmp_path, mode, "plain", 4)

    assert (row.loaded, row.whole, row.harm) == (4, 4, []), row.why


# ---- beside a recording ----


def test_a_recording_leaves_a_detached_process_alone(sleeper: subprocess.Popen[str]) -> None:
    attached(sleeper.pid)
    collector = DeviceTime([sleeper.pid], 200)
    collector.start()
    memory = InjectMemory.find(sleeper.pid)
    assert memory is not None
    with memory:
        collector.drain(0, to_the_end=False)
        memory.wait_for(abi.Status.WAITING, timeout_s=1.0)
        assert memory.seen().status is abi.Status.WAITING  # no device library is there
        sonde("detach", str(sleeper.pid))
        collector.drain(0, to_the_end=False)
        collector.pause()
        collector.resume()
        assert memory.seen().status is abi.Status.LEFT

        sonde("attach", str(sleeper.pid))
        collector.drain(0, to_the_end=False)
        memory.wait_for(abi.Status.WAITING, timeout_s=1.0)
        assert memory.seen().status is abi.Status.WAITING
        sonde("detach", str(sleeper.pid))
        collector.stop()
        assert memory.is_detached()


def wait_for_rows(attacher: Attacher, seconds: float = 10.0) -> list[tuple[object, ...]]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if rows := attacher.rows(1):
            return rows
        time.sleep(0.05)
    return []


def mapped(pid: int, path: str) -> list[ProcessEvent]:
    return [MmapEvent(1, pid, pid, 0, 0, 0, (0, 0, 1), path)]


def test_a_process_that_maps_a_device_library_gets_ours(sleeper: subprocess.Popen[str]) -> None:
    attacher = Attacher(Policy("all"), frozenset({os.getpid()}))
    attacher.start()
    attacher.on_process_events(mapped(sleeper.pid, "/usr/lib/libc.so.6"))
    attacher.on_process_events(mapped(sleeper.pid, "/usr/lib/libcuda.so.1") * 3)
    rows = wait_for_rows(attacher)
    attacher.stop()

    assert [(row[1], row[2], row[3]) for row in rows] == [("notice", "attached", sleeper.pid)]
    memory = InjectMemory.find(sleeper.pid)
    assert memory is not None
    memory.close()


def test_a_process_that_is_stopped_gets_it_once_it_goes_on(
    sleeper: subprocess.Popen[str],
) -> None:
    attacher = Attacher(Policy("all"), frozenset({os.getpid()}))
    attacher.start()
    sleeper.send_signal(signal.SIGSTOP)
    attacher.on_process_events(mapped(sleeper.pid, "/usr/lib/libcuda.so.1"))
    [(_, _, name, pid, *_, text)] = wait_for_rows(attacher)
    assert (name, pid) == ("attach_waits", sleeper.pid)
    assert "is stopped" in str(text)
    sleeper.send_signal(signal.SIGCONT)
    [(_, _, name, pid, *_)] = wait_for_rows(attacher)
    attacher.stop()
    assert (name, pid) == ("attached", sleeper.pid)


def test_others_are_left_alone(sleeper: subprocess.Popen[str]) -> None:
    for policy, roots in (
        (Policy("off"), None),
        (Policy("allow-list", ["exe:trainer"]), None),
        (Policy("all"), frozenset({1_000_000})),
    ):
        loads: list[int] = []
        attacher = Attacher(policy, roots, lambda *it, loads=loads: loads.append(it[0]))
        attacher.on_process_events(mapped(sleeper.pid, "/usr/lib/libcuda.so.1"))
        assert not len(attacher._waiting)
        attacher.stop()


def test_a_failure_of_ours_makes_the_next_wait(
    sleeper: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(pid: int, _program: str) -> None:
        raise TracerFailed("it broke")

    monkeypatch.setattr("sonde.agent.attaching.SETTLE_S", 0.0)
    attacher = Attacher(Policy("all"), None, fails)
    attacher._thread.start()
    attacher.consider(sleeper.pid)
    rows = wait_for_rows(attacher)
    attacher.stop()

    assert rows[0][2] == "attach_failed"
    assert "the next attach in 60 s" in str(rows[0][6])


def test_remote_names_what_it_cannot_find(sleeper: subprocess.Popen[str]) -> None:
    assert not remote.is_mapped(sleeper.pid)
