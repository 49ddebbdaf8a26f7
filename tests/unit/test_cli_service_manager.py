# SPDX-License-Identifier: Apache-2.0
"""Reports to systemd, on a real socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sonde.cli import service_manager
from sonde.cli.service_manager import ServiceManager


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
    service.ready()

    assert manager.recv(64) == b"READY=1"
