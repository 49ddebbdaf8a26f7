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


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("bash\0-lc\0mysql -phunter2", "bash -lc …"),
        ("sh\0-ec\0echo hunter2", "sh -ec …"),
        ("sh\0-xehunter2c\0x", "sh …"),
        ("python3\0-Ic\0hunter2()", "python3 -Ic …"),
        ("python3.12\0-Wignore\0-Xfaulthandler\0/a/train.py\0hunter2", "python3.12 train.py …"),
        ("python3\0-X\0hunter2.py\0train.py", "python3 train.py"),
        ("perl\0-E\0say q(hunter2)", "perl -E …"),
        ("perl\0-ehunter2", "perl …"),
        ("perl\0-Ilib\0job.pl", "perl job.pl"),
        ("node\0-p\0hunter2", "node -p …"),
        ("node\0--eval\0hunter2", "node …"),
        ("node\0--eval=hunter2", "node …"),
        ("node\0--title\0hunter2", "node …"),
        ("node\0--max-old-space-size=4096\0/srv/app.js\0hunter2", "node app.js …"),
        ("php\0-r\0hunter2", "php -r …"),
        ("php\0-d\0key=hunter2\0-f\0page.php", "php page.php"),
        ("ruby\0-rjson\0job.rb", "ruby job.rb"),
        ("Rscript\0-e\0hunter2()", "Rscript -e …"),
        ("zsh\0--\0deploy", "zsh deploy"),
        ("bash\0-s\0hunter2", "bash …"),
    ],
)
def test_no_program_text_and_no_value_of_an_option_is_shown(
    line: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: str, _: int) -> bytes:
        return line.encode() + b"\0" if path.endswith("cmdline") else b""

    monkeypatch.setattr("sonde.procfs.command.read_file", read)
    assert procfs.command_of(1, "comm") == found


def test_a_module_is_named(tmp_path: Path, script: Path) -> None:
    name = Path(sys.executable).name
    assert shown(sys.executable, "-m", "train", PYTHONPATH=str(tmp_path)) == f"{name} -m train"


def test_a_process_without_a_command_line_keeps_its_name() -> None:
    assert procfs.command_of(2, "kthreadd") == "kthreadd"
    assert procfs.command_of(1 << 22, "gone") == "gone"
