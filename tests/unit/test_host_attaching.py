# SPDX-License-Identifier: Apache-2.0
"""What `sonde doctor` reports about attaching."""

from __future__ import annotations

from pathlib import Path

import pytest

from sonde.attach import kill_switch
from sonde.host.attaching import attach_finding
from sonde.host.finding import Status

PTRACE = 1 << 19


@pytest.fixture(autouse=True)
def is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kill_switch, "FILES", ())


@pytest.mark.parametrize(
    ("scope", "capabilities", "machine", "status", "detail"),
    [
        (None, PTRACE, "x86_64", Status.PASS, "every user"),
        (None, 0, "x86_64", Status.PASS, "this user"),
        ("1", PTRACE, "x86_64", Status.PASS, "every user"),
        ("1", 0, "x86_64", Status.WARN, "ptrace_scope is 1"),
        ("2", 0, "x86_64", Status.WARN, "ptrace_scope is 2"),
        ("3", PTRACE, "x86_64", Status.WARN, "no process"),
        (None, PTRACE, "aarch64", Status.WARN, "x86-64 only"),
    ],
)
def test_whom_this_user_may_attach_to(
    tmp_path: Path, scope: str | None, capabilities: int, machine: str, status: Status, detail: str
) -> None:
    yama = tmp_path / "ptrace_scope"
    if scope is not None:
        yama.write_text(scope + "\n")

    found = attach_finding(yama, machine, capabilities)

    assert found.status is status
    assert detail in found.detail
    assert bool(found.remedy) == (status is Status.WARN)


def test_a_setting_that_cannot_be_read_is_not_taken_for_none(tmp_path: Path) -> None:
    found = attach_finding(tmp_path, "x86_64", PTRACE)  # a folder

    assert found.status is Status.ABSENT
    assert str(tmp_path) in found.detail


def test_the_kill_switch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "off"
    path.touch()
    monkeypatch.setattr(kill_switch, "FILES", (path,))

    found = attach_finding(tmp_path / "none", "x86_64", PTRACE)

    assert found.status is Status.WARN
    assert found.remedy == f"rm {path}"
