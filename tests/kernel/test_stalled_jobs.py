# SPDX-License-Identifier: Apache-2.0
"""`sonde diagnose` beside real jobs whose ranks wait in a collective: the rank that is missing is
named with its line, within 10 s. The collective library is a stand-in (tests/programs/ranks)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.bpf

PROGRAMS = Path(__file__).parents[1] / "programs" / "ranks"
USUAL_S = 13.0
WITHIN_S = 10.0
PATIENCE_S = 60
EARLIER_S = 1.5
SAME_WAIT = {"lock", "remote-dependency", "unknown"}
LINES = (PROGRAMS / "job.py").read_text().splitlines()


class Job:
    def __init__(self, library: Path, ranks: int, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "job.py"), str(library), str(ranks), *flags],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        rows = [self.process.stdout.readline().split() for _ in range(ranks)]
        self.pids = [int(pid) for _, pid in rows]

    def stall(self, rank: int, what: str) -> float:
        """When it began, CLOCK_MONOTONIC, s."""
        if what == "stop":
            os.kill(self.pids[rank], signal.SIGSTOP)
            return time.monotonic()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{rank} {what}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline().split()[2]) / 1e9

    def close(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "libgloo-standin.so"
    subprocess.run(
        ["cc", "-O1", "-g", "-shared", "-fPIC", "-o", path, PROGRAMS / "exchange.c"], check=True
    )
    return path


def line_of(what: str) -> int:
    """Of the last statement of a function of the job's."""
    start = next(at for at, line in enumerate(LINES) if f"def stall_{what}(" in line)
    return next(at for at in range(start, len(LINES)) if not LINES[at].strip())


@pytest.mark.parametrize(
    ("first", "second"),
    [(("sleep", "sleeps"), ("stop", "stopped")), (("lock", "a lock"), ("pipe", "a pipe"))],
)
def test_the_missing_rank_is_named_in_time(library, first, second):
    jobs = [Job(library, 4), Job(library, 2, "--unnumbered")]
    watching = subprocess.Popen(
        [sys.executable, "-m", "sonde", "diagnose", "--json", "--no-device"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert watching.stderr is not None
        for line in watching.stderr:
            if line.startswith("sonde: watching"):
                break
        time.sleep(USUAL_S)
        began = [jobs[0].stall(2, first[0]), jobs[1].stall(1, second[0])]
        time.sleep(WITHIN_S)
        watching.send_signal(signal.SIGINT)
        output, _ = watching.communicate(timeout=PATIENCE_S)
    finally:
        for job in jobs:
            job.close()
        watching.kill()
        watching.wait()
    found = [json.loads(line) for line in output.splitlines()]
    stalls = {one["victim"]: one for one in found if one["verdict"]["ranks"]}
    wanted = [(jobs[0], 2, *first, began[0]), (jobs[1], 1, *second, began[1])]
    for job, rank, what, doing, at_s in wanted:
        incident = stalls[job.pids[rank]]
        assert incident["verdict"]["cause"] == "stalled-job"
        assert incident["explained_ns"] / 1e9 - at_s < WITHIN_S
        missing = [one for one in incident["verdict"]["ranks"] if one["is_missing"]]
        assert [(one["pid"], one["rank"]) for one in missing] == [(job.pids[rank], rank)]
        assert doing in missing[0]["doing"]
        # What the others wait for is the stall: they have no incidents of it by themselves.
        waiting = {one["pid"] for one in incident["verdict"]["ranks"] if not one["is_missing"]}
        theirs = [
            one["verdict"]["cause"] for one in found
            if one["victim"] in waiting and one["began_ns"] / 1e9 > at_s - EARLIER_S
        ]  # fmt: skip
        assert not SAME_WAIT & set(theirs), theirs
        assert any("job.py:" in text for text in missing[0]["stack"])
        if what != "stop":
            assert missing[0]["line"].endswith(f"job.py:{line_of(what)}")
