# SPDX-License-Identifier: Apache-2.0
"""Live counts of a recording."""

from __future__ import annotations

import io
import time

from sonde.agent import Live
from sonde.cli import progress

LIVE = Live(
    elapsed_s=12.4,
    samples=4712,
    waits=83201,
    device_calls=96,
    spans=10,
    lost=0,
    processes=7,
    written_bytes=1_234_567,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_counts_are_printed_in_one_line() -> None:
    assert progress.describe(LIVE, None) == (
        "12 s  4,712 samples  83,201 waits  96 device calls  1.23 MB"
    )


def test_a_known_duration_gets_a_bar_that_never_overflows() -> None:
    assert progress.describe(LIVE, 24.8).startswith("████████░░░░░░░░ 12/24.8 s  ")
    assert progress.describe(LIVE, 5).startswith("████████████████ 12/5 s  ")


def test_losses_stand_out() -> None:
    lossy = Live(1, 2, 3, 4, 5, 1_000, 7, 8)

    assert progress.describe(lossy, None).endswith("1,000 LOST")


def test_a_terminals_line_is_rewritten_once_a_second_and_taken_away() -> None:
    terminal = Terminal()
    shown = progress.Progress(terminal, None)
    shown.update(LIVE)
    shown.update(LIVE)
    shown.clear()

    assert terminal.getvalue().count("samples") == 1
    assert terminal.getvalue().startswith("\r\033[K12 s")
    assert terminal.getvalue().endswith("\r\033[K")


def test_elsewhere_lines_are_plain_and_seldom() -> None:
    stream = io.StringIO()
    shown = progress.Progress(stream, None)
    shown.update(LIVE)
    assert stream.getvalue() == ""

    shown._next_s = 0
    shown.update(LIVE)
    shown.clear()
    assert stream.getvalue() == progress.describe(LIVE, None) + "\n"


def test_quiet_is_quiet() -> None:
    terminal = Terminal()
    shown = progress.Progress(terminal, None, quiet=True)
    shown.update(LIVE)
    shown.clear()

    assert terminal.getvalue() == ""


def test_a_start_that_takes_long_is_noted(monkeypatch):
    monkeypatch.setattr(progress, "SLOW_START_S", 0.01)
    shown = io.StringIO()
    with progress.noted_start(shown):
        time.sleep(0.3)
    assert shown.getvalue().startswith("sonde: starting: ")

    for quiet in (True, False):
        monkeypatch.setattr(progress, "SLOW_START_S", 0.01 if quiet else 60)
        shown = io.StringIO()
        with progress.noted_start(shown, quiet=quiet):
            time.sleep(0.1)
        assert shown.getvalue() == ""
