# SPDX-License-Identifier: Apache-2.0
"""Texts for people fit the terminal; in a pipe a line stays one."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from captures import scene
from sonde.export.layout import width_of, wrapped


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("short", 40, ["short"]),
        ("one two three four", 12, ["one two", "    three", "    four"]),
        ("  next: do this and that", 14, ["  next: do", "      this and", "      that"]),
        ("a" * 30 + " b", 20, ["a" * 30, "    b"]),
        ("\u8a9e\u8a9e\u8a9e \u8a9e\u8a9e", 10, ["\u8a9e\u8a9e\u8a9e", "    \u8a9e\u8a9e"]),
        ("one\ntwo", 40, ["one", "two"]),
        ("", 40, [""]),
        (" " * 30 + "deep in a column", 40, [" " * 30 + "deep in a column"]),
    ],
)
def test_lines_are_wrapped_at_spaces(text: str, width: int, lines: list[str]) -> None:
    assert wrapped(text, width).split("\n") == lines


def test_nothing_is_lost() -> None:
    text = "evidence: " + " ".join(f"word{number}" for number in range(200))
    found = wrapped(text, 60)
    assert found.split() == text.split()
    assert max(map(width_of, found.split("\n"))) <= 60


def printed(arguments: list[str], columns: int | None) -> str:
    """What a command prints on a terminal with these `columns`; None: into a pipe."""
    command = [sys.executable, "-m", "sonde", *arguments]
    if columns is None:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    master, slave = pty.openpty()
    environment = os.environ | {"COLUMNS": str(columns), "LINES": "50"}
    process = subprocess.Popen(command, stdout=slave, env=environment)
    os.close(slave)
    taken = b""
    try:
        while block := os.read(master, 65_536):
            taken += block
    except OSError:  # the other end is closed
        pass
    os.close(master)
    assert process.wait(timeout=60) == 0
    return taken.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("command", "columns"), [(["explain"], 64), (["report", "--format", "summary"], 100)]
)
def test_a_terminal_gets_lines_that_fit_and_a_pipe_whole_ones(
    tmp_path: Path, command: list[str], columns: int
) -> None:
    writer = scene()
    writer.event("loss", "odd.kind", 9, "words " * 40)
    path = str(writer.write(tmp_path / "a.sonde"))
    piped, shown = printed([*command, path], None), printed([*command, path], columns)
    assert max(map(width_of, piped.split("\n"))) > 100
    assert max(map(width_of, shown.split("\n"))) <= columns
    assert shown.split() == piped.split()
