# SPDX-License-Identifier: Apache-2.0
"""Memory of a library that cannot be asked for anything is closed again: a process may seal it
against writing, and each try would keep a descriptor and all of the memory."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from sonde.collect import device_time
from sonde.collect.device_time import DeviceTime


class Memory:
    """A library's, sealed against writing."""

    def __init__(self, fails_at: str) -> None:
        self.fd, self.pid, self.closed, self._fails_at = 5, 42, 0, fails_at

    def _may_fail(self, name: str) -> None:
        if name == self._fails_at:
            raise PermissionError(1, "sealed")

    def is_detached(self) -> bool:
        self._may_fail("is_detached")
        return False

    def lock(self) -> bool:
        self._may_fail("lock")
        return True

    def seen(self):
        self._may_fail("seen")
        return SimpleNamespace(counts={"head": 0})

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("fails_at", ["is_detached", "lock", "seen"])
def test_it_is_closed_whatever_fails(monkeypatch, fails_at):
    memory, dropped = Memory(fails_at), []
    collector = DeviceTime.__new__(DeviceTime)
    collector._finder = SimpleNamespace(find=lambda pid, party: memory)
    collector._withheld, collector._processes = {}, {}
    collector._carried = threading.Event()
    collector._sites = SimpleNamespace(drop=dropped.append)
    monkeypatch.setattr(device_time.procfs, "party_of", lambda pid: 1)
    monkeypatch.setattr(device_time.procfs, "read_stat", lambda pid: SimpleNamespace(start_ns=1))
    with pytest.raises(PermissionError):
        collector._open(42)
    assert memory.closed == 1
    assert dropped == [42]
    assert not collector._processes
