# SPDX-License-Identifier: Apache-2.0
"""Root works in a directory of an unprivileged user: nothing that lies there is run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hostile_folder import hostile_folder
from nvml_stub import Stub

pytestmark = pytest.mark.bpf

SONDE = str(Path(sys.executable).with_name("sonde"))
BANDWIDTH = """
from types import SimpleNamespace
from sonde.health import bandwidth
device = SimpleNamespace(uuid="GPU-0", about={}, get=lambda *_, **__: None, label="")
bandwidth.is_part = lambda _: False
try:
    bandwidth.measure(SimpleNamespace(devices=[device]))
except Exception as error:
    print(error)
"""


@pytest.fixture
def hostile():
    if os.geteuid() != 0:
        pytest.skip("gives a folder to another user, and works there as root")
    with hostile_folder() as folder:
        yield folder


@pytest.fixture
def environment(tmp_path, hostile):
    """With a device to ask, and a search path that begins in the working directory."""
    stub = Stub(tmp_path)
    found = stub.environment
    return {
        **found,
        "PATH": f":{found['PATH']}",
        "LD_LIBRARY_PATH": f":{found['LD_LIBRARY_PATH']}",
    }


def run(hostile, environment, *command, wait_s=60.0):
    return subprocess.run(
        command, cwd=hostile.folder, env=environment, capture_output=True, text=True, timeout=wait_s
    )


def test_every_command(hostile, environment, tmp_path):
    capture = str(tmp_path / "c.sonde")
    sleeper = subprocess.Popen(["sleep", "100"])
    commands = {
        "record": [SONDE, "record", "-q", "-d", "1.5", "-o", capture],
        "report": [SONDE, "report", "--lines", capture],
        "health": [SONDE, "health"],
        "top": [SONDE, "top", "--once"],
        "dump": [SONDE, "dump", str(sleeper.pid)],
        "doctor": [SONDE, "doctor"],
        "attach": [SONDE, "attach", str(sleeper.pid)],
        "bandwidth": [sys.executable, "-P", "-c", BANDWIDTH],
    }
    ran = {}
    try:
        for name, command in commands.items():
            done = run(hostile, environment, *command)
            if name in ("record", "report", "top", "dump"):
                assert done.returncode == 0, (name, done.stderr)
            ran[name] = hostile.forget()
    finally:
        sleeper.kill()
        sleeper.wait()

    assert not any(ran.values()), ran


def test_the_agent(hostile, environment):
    agent = subprocess.Popen(
        [SONDE, "agent", "--prometheus", "127.0.0.1:0"],
        cwd=hostile.folder,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert agent.stderr is not None
    line = agent.stderr.readline()
    time.sleep(2)
    agent.send_signal(signal.SIGTERM)
    agent.communicate(timeout=20)

    assert "metrics at" in line
    assert agent.returncode == 0
    assert hostile.forget() == []


def test_a_program_after_the_dashes_keeps_its_own_environment(hostile, environment, tmp_path):
    """Only children of ours are isolated: what a user records runs as it does without us."""
    program = "import json; print('theirs' if 'hostile' in json.__file__ else 'standard')"
    wished = {**environment, "PYTHONPATH": str(hostile.folder), "LD_BIND_NOW": "1", "MINE": "2"}
    shown = "import os; print(*(os.environ[n] for n in ('PYTHONPATH', 'LD_BIND_NOW', 'MINE')))"
    for name in ("sitecustomize.py", "usercustomize.py"):
        (hostile.folder / name).unlink()

    done = run(
        hostile, environment | {"PYTHONPATH": ""}, SONDE, "record", "-q", "-o",
        str(tmp_path / "c.sonde"), "--", "env", "-C", "/", sys.executable, "-c", program,
    )  # fmt: skip
    assert done.stdout == "standard\n", done.stderr
    hostile.forget()

    done = run(
        hostile, environment, SONDE, "record", "-q", "-o", str(tmp_path / "d.sonde"), "--",
        "env", *(f"{name}={wished[name]}" for name in ("PYTHONPATH", "LD_BIND_NOW", "MINE")),
        sys.executable, "-c", shown,
    )  # fmt: skip
    assert done.stdout == f"{hostile.folder} 1 2\n", done.stderr
