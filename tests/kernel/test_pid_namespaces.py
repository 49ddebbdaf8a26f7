# SPDX-License-Identifier: Apache-2.0
"""Inside a pid namespace the numbers of processes are not those that the kernel reports to BPF:
what would name a wrong process is refused, with the cause and the remedy; the rest is right."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.bpf,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None, reason="makes namespaces"
    ),
]

SONDE = str(Path(sys.executable).with_name("sonde"))
CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc")
WITH_THE_HOST_S_PROC = ("unshare", "--pid", "--fork")
USER_TOO = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
INSIDE = {"a container": CONTAINER, "the host's /proc": WITH_THE_HOST_S_PROC, "a user's": USER_TOO}


def inside(kind: str, script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in the namespace, beside a process whose number there is $P."""
    return subprocess.run(
        [*INSIDE[kind], "bash", "-c", f"sleep 60 & P=$!; {script}; S=$?; kill $P; exit $S"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("kind", INSIDE)
@pytest.mark.parametrize(
    "command",
    [
        "record -d 1 -o c.sonde -p $P",
        "record -d 1 -o c.sonde",
        "record -o c.sonde -- touch ran",
        "explain --pid $P",
        "dump $P",
        "agent --prometheus 127.0.0.1:0",
    ],
)
def test_what_the_kernel_s_numbers_decide_is_refused(kind, command, tmp_path):
    done = inside(kind, f"{SONDE} {command}", tmp_path)

    assert done.returncode == 3, (done.stdout, done.stderr)
    assert "pid namespace" in done.stderr
    assert "--pid=host" in done.stderr
    assert "hostPID: true" in done.stderr
    assert not list(tmp_path.iterdir())  # neither a capture, nor did the program run


@pytest.mark.parametrize("kind", ["a container", "a user's"])
def test_top_shows_the_processes_of_the_container_by_their_own_numbers(kind, tmp_path):
    script = f"{SONDE} top --once --json; echo $P > number"
    done = inside(kind, script, tmp_path)

    shown = {it["pid"]: it["name"] for it in json.loads(done.stdout)["processes"]}
    assert shown[int((tmp_path / "number").read_text())] == "sleep"
    assert set(shown.values()) <= {"bash", "sleep", "sonde", "python", "python3"}


def test_attach_refuses_numbers_of_another_namespace_s_proc(tmp_path):
    """ptrace would borrow a thread of another process than the one that /proc describes."""
    victim = subprocess.Popen(["sleep", "60"])
    try:
        done = inside("the host's /proc", f"{SONDE} attach {victim.pid}", tmp_path)
        mapped = Path(f"/proc/{victim.pid}/maps").read_text()
    finally:
        victim.kill()
        victim.wait()

    assert done.returncode == 3, done.stderr
    assert "/proc shows the process ids of another pid namespace" in done.stderr
    assert "sonde" not in mapped


def test_attach_reaches_a_process_of_its_own_namespace(tmp_path):
    script = f"{SONDE} attach $P && grep -c memfd:.*sonde /proc/$P/maps"
    done = inside("a container", script, tmp_path)

    assert done.returncode == 0, done.stderr
    assert "has the library" in done.stdout


@pytest.mark.parametrize("kind", INSIDE)
def test_doctor_reports_it(kind, tmp_path):
    done = inside(kind, f"{SONDE} doctor", tmp_path)

    assert "PID namespace" in done.stdout
    assert "--pid=host" in done.stdout
