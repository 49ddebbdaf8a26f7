# SPDX-License-Identifier: Apache-2.0
"""What an attaching process answers, and how it ends: which of both counts."""

from __future__ import annotations

import sys

import pytest

from sonde import interpreter
from sonde.attach import remote
from sonde.errors import AttachFailed, TracerFailed


@pytest.mark.parametrize(
    ("body", "failure", "cause"),
    [
        ("print('{}'); sys.exit(3)", TracerFailed, "no message"),
        ("sys.exit('cause\\nlast line')", TracerFailed, "last line"),
        ("pass", AttachFailed, "no message"),
        ("print('{}', flush=True); os.kill(os.getpid(), 9)", AttachFailed, "no message"),
        ("os.kill(os.getpid(), 9)", AttachFailed, "no message"),
    ],
)
def test_an_attaching_process_that_fails_has_attached_nothing(monkeypatch, body, failure, cause):
    command = [sys.executable, "-c", f"import os, sys; {body}"]
    monkeypatch.setattr(interpreter, "command", lambda *_: command)
    with pytest.raises((AttachFailed, TracerFailed), match=cause) as caught:
        remote._run([], 20.0, 0)
    assert type(caught.value) is failure


def test_the_answer_of_one_that_ends_well_is_read(monkeypatch):
    command = [sys.executable, "-c", "print('{\"outcome\": 7}')"]
    monkeypatch.setattr(interpreter, "command", lambda *_: command)
    assert remote._run([], 20.0, 0) == {"outcome": 7}


@pytest.fixture
def cannot_die(monkeypatch):
    """Tracers that do not answer, and stay however often they are killed."""
    left = []
    monkeypatch.setattr(remote, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(interpreter, "give_up", left.append)
    yield left
    for child in left:
        child.kill()
        child.wait()
    assert remote.hanging() == 0


def hang(monkeypatch, party):
    monkeypatch.setattr(interpreter, "command", lambda *_: ["/bin/sleep", "60"])
    with pytest.raises(AttachFailed, match="in time"):
        remote._run([], 0.01, party)


def works(monkeypatch, party):
    monkeypatch.setattr(interpreter, "command", lambda *_: [sys.executable, "-c", "print('{}')"])
    return remote._run([], 20.0, party) == {}


def test_tracers_that_hang_over_one_users_processes_stop_that_users_attaches_alone(
    monkeypatch, cannot_die
):
    for _ in range(remote.HANGING_OF_PARTY):
        assert works(monkeypatch, 12345)
        hang(monkeypatch, 12345)
    with pytest.raises(AttachFailed, match="of user 12345 were killed and hang") as caught:
        remote._run([], 20.0, 12345)
    assert type(caught.value) is AttachFailed, "this pauses nobody else"
    assert works(monkeypatch, 20001)
    cannot_die[0].kill()
    cannot_die[0].wait()
    assert works(monkeypatch, 12345)


def test_tracers_that_hang_are_bounded_in_all(monkeypatch, cannot_die):
    monkeypatch.setattr(remote, "MAX_HANGING", 3)
    for party in (1, 2, 3):
        hang(monkeypatch, party)
    with pytest.raises(TracerFailed, match="3 attaching processes were killed"):
        remote._run([], 20.0, 4)


def test_other_children_that_hang_stop_no_attach(monkeypatch):
    monkeypatch.setattr(interpreter, "hanging", lambda: 100)
    assert works(monkeypatch, 1)
