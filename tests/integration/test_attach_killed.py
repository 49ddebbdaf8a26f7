# SPDX-License-Identifier: Apache-2.0
"""An attaching process that dies before any one of its steps leaves the program as it was."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench import storms

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or os.uname().machine != "x86_64", reason="needs root on x86-64"
)
PROGRAM = """
import select, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
print("ready", flush=True)
while not select.select([0], [], [], 0.05)[0]:
    pass
"""
BLOCKED = 1 << (signal.SIGUSR2 - 1)
MAX_CALLS = 200
PATIENCE_S = 20.0


def states(pid: int) -> list[tuple[int, int]]:
    """(tracer, blocked signals) of the threads, but for the loaded library's own."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines = (line.split(":", 1) for line in (task / "status").read_text().splitlines())
        fields = {name: value.strip() for name, value in lines}
        if fields["Name"] != "storm-beat":
            found.append((int(fields["TracerPid"]), int(fields["SigBlk"], 16)))
    return found


def test_a_thread_is_itself_again_wherever_its_tracer_dies(tmp_path: Path) -> None:
    """Between the call that blocked its signals and the one that led it away, it kept them blocked
    for ever: a program whose threads wait for one another's answer to setgid() then hung."""
    storms.build(tmp_path)
    shim = tmp_path / "mortal.so"
    source = str(storms.PROGRAMS / "mortal.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", source, "-o", str(shim), "-ldl"], check=True)
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert program.stdin is not None
    assert program.stdout is not None
    try:
        assert program.stdout.readline() == "ready\n"
        for number in range(1, MAX_CALLS):
            tracer = [sys.executable, "-m", "sonde.attach.tracer", str(program.pid)]
            tracer += [str(tmp_path / "payload.so"), f"storm-{number}", "5"]
            env = os.environ | {"LD_PRELOAD": str(shim), "MORTAL_AT": str(number)}
            died = subprocess.run(tracer, env=env, stdout=subprocess.PIPE, check=False)
            ends = time.monotonic() + PATIENCE_S
            while states(program.pid) != [(0, BLOCKED)]:
                assert program.poll() is None, f"it ended, its tracer before call {number}"
                assert time.monotonic() < ends, (number, states(program.pid))
                time.sleep(0.01)
            if died.returncode != -signal.SIGKILL:
                assert died.returncode == 0
                break
        assert number > 20, "not one attach needs so few calls"
    finally:
        program.stdin.close()
        ready, _, _ = select.select([program.stdout], [], [], PATIENCE_S)
        program.stdout.close()
        if not ready:
            program.kill()
        assert program.wait() == 0
