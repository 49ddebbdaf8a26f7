# SPDX-License-Identifier: Apache-2.0
"""`sonde explain --pid` on a NumPy job whose OpenBLAS threads spin beside busy programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytestmark = [pytest.mark.bpf]

PROGRAM = Path(__file__).parents[1] / "programs" / "python" / "spinning_pool.py"
BUSY = "while True: pass"
OTHERS = 3
NICE = 3


@pytest.fixture
def crowded() -> Iterator[int]:
    """The pid of the job. All share two CPUs, whatever the machine has."""
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("one CPU: the library makes no pool")

    def lessen() -> None:
        os.sched_setaffinity(0, cpus)

    def nicer() -> None:
        lessen()
        os.nice(NICE)

    with ExitStack() as running:
        started = []
        for _ in range(OTHERS):
            other = subprocess.Popen([sys.executable, "-c", BUSY], preexec_fn=lessen)
            started.append(running.enter_context(other))
        job = running.enter_context(
            subprocess.Popen(
                [sys.executable, PROGRAM],
                preexec_fn=nicer,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "2"},
            )
        )
        try:
            assert job.stdout is not None
            assert job.stdout.readline() == "ready\n"
            yield job.pid
        finally:
            for one in (*started, job):
                one.kill()


def test_a_pool_that_spins_is_named_and_not_the_neighbours(crowded):
    command = [sys.executable, "-m", "sonde", "explain", "--pid", str(crowded), "-d", "5", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    verdict = next(
        one
        for one in json.loads(done.stdout)["verdicts"]
        if one["device_name"].endswith(f"({crowded})")
    )
    causes = {one["key"]: one for one in verdict["causes"]}
    queued = causes["run queue"]

    assert verdict["bounds"][0]["key"] == "cpu contention", verdict["evidence"]
    assert queued["facts"][0].startswith("the threads of OpenBLAS wait for one another by spinning")
    nice = os.getpriority(os.PRIO_PROCESS, 0) + NICE
    assert any(f"its nice value is {nice}" in fact for fact in queued["facts"]), queued["facts"]
    assert verdict["advice"][0]["text"].startswith("start it with OPENBLAS_NUM_THREADS=1")
    # It stands in the program's function, and what it does on a CPU is mostly no work.
    assert queued["locations"][0]["function"].startswith("step ")
    assert causes["spin"]["ns"] > causes.get("host", {"ns": 0})["ns"]
