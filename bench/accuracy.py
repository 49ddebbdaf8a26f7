# SPDX-License-Identifier: Apache-2.0
"""How right the figures are: programs that know their own truth, recorded at the default rate."""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.overhead import say
from bench.tools import Sonde
from sonde.model.profile import ProfileKind
from sonde.query.capture import read
from sonde.query.queries import Where, top_functions
from sonde.query.session import Session

PROGRAMS = Path(__file__).parents[1] / "tests/programs/truth"
SHARE_TOLERANCE = 0.025
WAIT_TOLERANCE = 0.02
WAITS = {"sleeper": "sleep", "futex_waiter": "futex", "pipe_reader": "read", "starved": "preempted"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured against one true value."""

    what: str
    measured: str
    truth: str
    error: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """It is within its tolerance."""
        return abs(self.error) <= self.tolerance


def measure(seconds: float) -> list[Figure]:
    """Shares of CPU time, and waits, over `seconds` each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return [*_shares(folder, seconds), *_waits(folder, seconds)]


def _record(folder: Path, name: str, seconds: float) -> tuple[Session, int, dict[str, Any]]:
    """A capture of one of the programs, its pid, and what it printed."""
    say(f"accuracy: {name}, {seconds:g} s")
    program = folder / name
    flags = ["-O2", "-fno-omit-frame-pointer", "-pthread"]
    subprocess.run(["cc", *flags, str(PROGRAMS / f"{name}.c"), "-o", str(program)], check=True)
    recorder = Sonde(folder, 0)
    try:
        recorder.wait_until_begun()
        process = subprocess.Popen([program, str(seconds)], stdout=subprocess.PIPE, text=True)
        truth = json.loads(process.communicate()[0])
        recorder.stop()
    finally:
        recorder.close()
    return Session(read(recorder.path)), process.pid, truth


def _shares(folder: Path, seconds: float) -> list[Figure]:
    session, pid, truth = _record(folder, "share", seconds)
    used = {
        use.function: use.total_ns
        for use in top_functions(session, ProfileKind.ON_CPU, Where(pids=[pid]))
    }
    both = used.get("three_quarters", 0) + used.get("one_quarter", 0)
    share = used.get("three_quarters", 0) / both if both else 0.0
    true_share = truth["three_quarters"] / (truth["three_quarters"] + truth["one_quarter"])
    return [
        Figure(
            "CPU share of a function",
            f"{share:.2%}",
            f"{true_share:.2%}",
            share - true_share,
            SHARE_TOLERANCE,
        )
    ]


def _waits(folder: Path, seconds: float) -> list[Figure]:
    session, _, truth = _record(folder, "waits", seconds)
    figures = []
    for thread, reason in WAITS.items():
        tid, true_s = truth[thread]
        ((found_s,),) = session.rows(
            "SELECT coalesce(sum(ns), 0) / 1e9 FROM activity WHERE tid = ? AND name = ?"
            " AND (kind = 'runqueue' OR name <> 'preempted')",
            [tid, reason],
        )
        error = found_s / true_s - 1
        what = f"wait of {thread} ({reason})"
        figures.append(Figure(what, f"{found_s:.3f} s", f"{true_s:.3f} s", error, WAIT_TOLERANCE))
    return figures


def print_figures(figures: list[Figure]) -> None:
    """A row each."""
    print(f"{'accuracy':32}{'measured':>12}{'truth':>12}{'error':>10}{'allowed':>10}")
    for it in figures:
        print(
            f"{it.what:32}{it.measured:>12}{it.truth:>12}{it.error:>+10.2%}{it.tolerance:>10.1%}"
            f"{'' if it.holds else '  missed'}"
        )
