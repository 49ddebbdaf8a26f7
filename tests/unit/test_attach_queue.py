# SPDX-License-Identifier: Apache-2.0
"""Attaches to one user's processes do not hold up another's."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sonde.agent import attach_queue
from sonde.agent.attach_queue import AttachQueue, Backoff
from sonde.agent.attaching import Attacher
from sonde.attach import kill_switch, process
from sonde.attach.policy import Policy
from sonde.errors import AttachFailed, TracerFailed

MALLORY, ALICE = 1001, 1002


def test_a_failure_over_a_users_process_pauses_that_user_alone() -> None:
    backoff = Backoff()

    assert [backoff.failed(MALLORY, 0.0) for _ in range(8)] == [
        60,
        120,
        240,
        480,
        960,
        1920,
        3600,
        3600,
    ]

    assert backoff.is_paused(MALLORY, 3599.0)
    assert not backoff.is_paused(ALICE, 0.0)
    assert not backoff.is_paused(MALLORY, 3600.0)


def test_a_failure_of_ours_pauses_everybody_until_one_works() -> None:
    backoff = Backoff()
    backoff.failed(None, 0.0)
    assert backoff.is_paused(ALICE, 59.0)
    assert not backoff.is_paused(ALICE, 60.0)
    backoff.worked(ALICE)
    assert backoff.failed(None, 0.0) == 60


def test_what_is_known_of_users_is_bounded() -> None:
    backoff = Backoff()
    for uid in range(3 * attach_queue._MAX_PARTIES):
        backoff.failed(uid, float(uid))
    assert len(backoff._of) == attach_queue._MAX_PARTIES
    assert backoff.is_paused(3 * attach_queue._MAX_PARTIES - 1, 3.0 * attach_queue._MAX_PARTIES)


def test_one_user_fills_neither_the_queue_nor_the_turns() -> None:
    queue = AttachQueue()
    kept = [queue.put((pid, 0), MALLORY, 0.0) for pid in range(1000)]
    assert kept.count(True) == attach_queue.MAX_WAITING_OF_PARTY
    assert queue.put((5000, 0), ALICE, 1.0)

    turns = [queue.take(2.0, Backoff()) for _ in range(2)]
    assert [uid for _, uid in filter(None, turns)] == [MALLORY, ALICE]


def test_a_paused_users_process_waits_and_others_pass_it() -> None:
    queue, backoff = AttachQueue(), Backoff()
    queue.put((1, 0), MALLORY, 0.0)
    queue.put((2, 0), ALICE, 1.0)
    backoff.failed(MALLORY, 0.0)

    assert queue.take(1.0, backoff) == ((2, 0), ALICE)
    assert queue.take(1.0, backoff) is None
    assert queue.take(60.0, backoff) == ((1, 0), MALLORY)


@pytest.mark.parametrize(
    ("error", "others_wait"), [(AttachFailed("it ended"), False), (TracerFailed("broken"), True)]
)
def test_the_agent_waits_for_everybody_only_when_it_failed_itself(
    error: AttachFailed, others_wait: bool
) -> None:
    def fails(pid: int, _program: str) -> None:
        raise error

    attacher = Attacher(Policy("all"), None, fails)
    attacher._attach((os.getpid(), process.start_time(os.getpid())), MALLORY)

    [(*_, text)] = attacher.rows(1)
    assert (f"user {MALLORY}" in str(text)) is not others_wait
    now_s = time.monotonic()
    assert attacher._backoff.is_paused(MALLORY, now_s)
    assert attacher._backoff.is_paused(ALICE, now_s) is others_wait


def test_a_process_whose_turn_comes_while_the_kill_switch_is_set_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "off"
    path.touch()
    monkeypatch.setattr(kill_switch, "FILES", (path,))
    loaded: list[int] = []

    attacher = Attacher(Policy("all"), None, lambda pid, _: loaded.append(pid))
    attacher._attach((os.getpid(), process.start_time(os.getpid())), ALICE)

    [row] = attacher.rows(1)
    assert "attach_refused" in row and str(path) in str(row)
    assert loaded == []
