# SPDX-License-Identifier: Apache-2.0
"""What a process was started as: enough to distinguish ranks, and nothing secret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sonde import procfs

WAIT = "import time; print(flush=True); time.sleep(60)"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(WAIT)
    return path


def shown(*command: str, **environment: str) -> str:
    """As it is shown while it runs."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, **environment}, text=True
    ) as process:
        assert process.stdout
        process.stdout.readline()
        try:
            return procfs.command_of(process.pid, "comm")
        finally:
            process.kill()


def test_ranks_of_a_job_differ(script: Path) -> None:
    name = Path(sys.executable).name
    for rank in "03":
        found = shown(sys.executable, "-u", str(script), "--lr", "0.1", RANK=rank)
        assert found == f"{name} train.py … [rank {rank}]"


def test_arguments_are_not_shown(script: Path) -> None:
    name = Path(sys.executable).name
    secret = "--password=hunter2"
    assert shown(sys.executable, "-X", "dev", str(script), secret) == f"{name} train.py …"
    assert shown(sys.executable, "-c", WAIT, secret) == f"{name} -c …"
    assert shown("sh", "-c", f"echo; sleep 60; : {secret}") == "sh -c …"


def test_a_module_is_named(tmp_path: Path, script: Path) -> None:
    name = Path(sys.executable).name
    assert shown(sys.executable, "-m", "train", PYTHONPATH=str(tmp_path)) == f"{name} -m train"


def test_a_process_without_a_command_line_keeps_its_name() -> None:
    assert procfs.command_of(2, "kthreadd") == "kthreadd"
    assert procfs.command_of(1 << 22, "gone") == "gone"
