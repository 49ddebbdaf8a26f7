# SPDX-License-Identifier: Apache-2.0
"""Reports to systemd, on a real socket; what SIGHUP asks for."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sonde.agent.reload import LIVE, difference
from sonde.cli import service_manager
from sonde.cli.service_manager import ServiceManager
from sonde.config import Config
from sonde.errors import UsageError


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(path))
        server.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        yield server


def test_a_daemon_reports_its_start_its_work_and_its_end(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "40000000")
    now_s = [100.0]
    monkeypatch.setattr(service_manager.time, "monotonic", lambda: now_s[0])
    service = ServiceManager()
    service.ready()
    for _ in range(30):
        service.working()
        now_s[0] += 1
    service.stopping()

    assert [manager.recv(64) for _ in range(5)] == [
        *(b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1", b"WATCHDOG=1", b"STOPPING=1"),
    ]
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC"} & set(os.environ)


@pytest.mark.usefixtures("manager")
def test_a_manager_that_does_not_read_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "1")
    service = ServiceManager()
    for _ in range(2_000):
        service.working()
        service.ready()


@pytest.mark.parametrize("address", ["", "relative", "/nowhere/at/all", "@" + "x" * 300])
def test_without_a_manager_nothing_is_reported(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    monkeypatch.setenv("WATCHDOG_USEC", "1")
    service = ServiceManager()
    service.ready()
    service.working()
    service.stopping()


def test_another_processs_watchdog_is_not_ours(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "1")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid() + 1))
    service = ServiceManager()
    service.working()
    service.reloading()
    service.ready()

    first, _, second = manager.recv(64).partition(b"\n")
    assert (first, second.partition(b"=")[0]) == (b"RELOADING=1", b"MONOTONIC_USEC")
    assert manager.recv(64) == b"READY=1"


def test_what_can_change_live_is_taken_and_the_rest_is_named() -> None:
    running = Config(server="https://a", chunk_s=5)
    wanted = dataclasses.replace(
        running, chunk_s=9, otlp="http://c:4318", hz=19, server="https://b"
    )
    found = difference(running, wanted)

    assert found.changed == ("chunk_s", "otlp")
    assert found.refused == ("hz (99, not 19)", "server ('https://a', not 'https://b')")
    assert found.taken == dataclasses.replace(running, chunk_s=9, otlp="http://c:4318")
    assert {field.name for field in dataclasses.fields(Config)} >= LIVE
    assert difference(running, running).changed == ()


def test_live_settings_must_go_together_with_those_that_stay() -> None:
    running = Config(tick_s=10, chunk_s=10)
    with pytest.raises(UsageError, match="chunk_s"):
        difference(running, Config(tick_s=1, chunk_s=5))


HANGS_UP = """
import os, signal, subprocess, sys, threading
from sonde.cli.service_manager import HangUps
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
hang_ups = HangUps()
threading.Thread(target=threading.Event().wait, daemon=True).start()
assert not hang_ups.came()
for _ in range(3):
    os.kill(os.getpid(), signal.SIGHUP)
assert hang_ups.came() and not hang_ups.came()
child = "import os, signal; os.kill(os.getpid(), signal.SIGHUP); print('lives')"
subprocess.run([sys.executable, "-c", child], check=True)
"""


def test_hang_ups_end_neither_the_daemon_nor_its_children() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS_UP], capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (0, "lives\n"), done.stderr
