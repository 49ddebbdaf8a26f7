# SPDX-License-Identifier: Apache-2.0
"""`sonde top` and `sonde dump` show what they left out."""

from __future__ import annotations

import pytest

from sonde import procfs
from sonde.cli import unread_processes


def test_what_was_put_off_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = procfs.Broker()
    monkeypatch.setattr(procfs, "BROKER", broker)
    assert unread_processes.line() == ""
    broker.put_off(1200)
    assert unread_processes.line().startswith("put off 1,200 times")
    broker.leave_alone(77)
    assert unread_processes.line().startswith("left out: 1 process: a read")
    assert unread_processes.counts() == {
        "processes": 1,
        "processes_with_files": 0,
        "put_off": 1200,
    }
