# SPDX-License-Identifier: Apache-2.0
"""`-p $(pgrep -f NAME)` names the command itself, too, and the shell that it was typed in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sonde.cli.own_processes import without_own
from sonde.errors import UsageError


@pytest.fixture
def other() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        assert process.stdin is not None
        process.stdin.close()


def test_this_command_and_what_started_it_are_left_out(other: int) -> None:
    kept, line = without_own([os.getppid(), os.getpid(), other, other])

    assert kept == [other]
    assert line.startswith(f"not recorded: {os.getppid()} (")
    assert f", {os.getpid()} (" in line
    assert "\n" not in line


def test_others_are_recorded_without_a_word(other: int) -> None:
    assert without_own([other]) == ([other], "")


def test_a_program_may_record_itself() -> None:
    """`sonde.record()` starts such a command with the program's own number."""
    assert without_own([os.getppid()]) == ([os.getppid()], "")


def test_this_command_alone_is_refused() -> None:
    with pytest.raises(UsageError, match="this command itself"):
        without_own([os.getpid()])


def test_a_process_that_has_ended_is_left_to_the_recorder() -> None:
    assert without_own([2**22 + 7]) == ([2**22 + 7], "")
