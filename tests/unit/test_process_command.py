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
        ("python3\0-m\0/home/u/hunter2", "python3 …"),
        ("java\0@/home/u/hunter2", "java …"),
        ("java\0@hunter2", "java …"),
        ("bash\0--init-file\0hunter2.sh", "bash"),
        ("bash\0--rcfile\0hunter2.sh\0job.sh", "bash job.sh"),
        ("node\0--watch-path\0hunter2.js\0server.js", "node server.js"),
        ("node\0--env-file\0hunter2.js\0server.js\0x", "node server.js …"),
        ("perl\0-E\0say q(hunter2)", "perl -E …"),
        ("perl\0-ehunter2", "perl …"),
        ("perl\0-Ilib\0job.pl", "perl job.pl"),
        ("perl\0-I\0/home/u/hunter2\0job.pl", "perl job.pl"),
        ("php\0--\0hunter2", "php …"),
        ("java\0--module=m/C\0hunter2", "java …"),
        ("node\0-p\0hunter2", "node -p …"),
        ("node\0--eval\0hunter2", "node …"),
        ("node\0--eval=hunter2", "node …"),
        ("node\0--title\0hunter2", "node"),
        ("node\0--max-old-space-size=4096\0/srv/app.js\0hunter2", "node app.js …"),
        ("php\0-r\0hunter2", "php -r …"),
        ("php\0-d\0key=hunter2\0-f\0page.php", "php page.php"),
        ("ruby\0-rjson\0job.rb", "ruby job.rb"),
        ("Rscript\0-e\0hunter2()", "Rscript -e …"),
        ("zsh\0--\0deploy", "zsh deploy"),
        ("bash\0-s\0hunter2", "bash …"),
        ("java\0-Xmx4g\0-Dkey=hunter2\0-jar\0/srv/app.jar\0hunter2", "java app.jar …"),
        ("java\0-cp\0/srv/hunter2\0org.app.Main\0hunter2", "java org.app.Main …"),
        ("java\0--module-path\0hunter2\0-m\0org.app/org.app.Main", "java org.app.Main"),
        ("java\0--unknown\0hunter2", "java …"),
        ("java\0@hunter2", "java …"),
        ("python3\0-m\0hunter2 hunter2", "python3 …"),
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


@pytest.mark.parametrize(
    ("line", "environment", "found"),
    [
        (
            "python3\0-u\0/srv/train.py\0--lr\0hunter2",
            "A=1\0RANK=3\0TOKEN=hunter2",
            "train.py rank 3",
        ),
        ("/venv/bin/python3.13t\0/venv/bin/pytest\0-q", "", "pytest"),
        ("python3\0-m\0torch.distributed.run\0train.py", "", "-m torch.distributed.run"),
        ("java\0-jar\0/srv/app.jar", "", "app.jar"),
        ("node\0/srv/server.js", "", "server.js"),
        ("python3\0-c\0hunter2()", "", ""),
        ("python3\0-c\0hunter2()", "OMPI_COMM_WORLD_RANK=12", "python3 rank 12"),
        ("python3\0" + "a" * 101 + ".py", "", ""),
        ("python3\0a\x1b[31m.py", "", "a\\x1b[31m.py"),
        ("python3\0a\n.py", "", ""),
        ("python3\0-m\0a\x1b[31m", "", ""),
        ("/usr/bin/postgres\0-D\0/srv/hunter2", "RANK=1", ""),
        ("ray::train hunter2", "", ""),
        ("\0\0", "", ""),
        ("", "", None),
    ],
)
def test_what_interpreters_run(
    line: str, environment: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broker:
        @staticmethod
        def each(whos: list[int], paths: list[str], limit: int, **_: bool) -> list[bytes | None]:
            texts = [line if path.endswith("cmdline") else environment for path in paths]
            return [text.encode()[:limit] or None for text in texts]

    monkeypatch.setattr("sonde.procfs.command.BROKER", Broker)
    assert procfs.scripts_of([7]) == [found]


def test_the_environment_of_other_programs_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    class Broker:
        @staticmethod
        def each(whos: list[int], paths: list[str], limit: int, **_: bool) -> list[bytes | None]:
            read.extend(paths)
            return [b"python3\0a.py\0" if path == "/proc/7/cmdline" else b"cat\0" for path in paths]

    monkeypatch.setattr("sonde.procfs.command.BROKER", Broker)
    assert procfs.scripts_of([7, 8]) == ["a.py", ""]
    assert read == ["/proc/7/cmdline", "/proc/8/cmdline", "/proc/7/environ"]


@pytest.mark.parametrize(
    ("script", "comm", "shown"),
    [
        ("train.py rank 3", "python3.11", "train.py rank 3"),
        ("train.py", "pt_main_thread", "train.py"),
        ("a_script_with_a_name.py", "a_script_with_a", "a_script_with_a_name.py"),
        ("train.py rank 3", "pt_data_worker", "pt_data_worker of train.py rank 3"),
        ("server.js", "MainThread", "server.js"),
        ("", "nginx", ""),
        ("train.py", "", "train.py"),
    ],
)
def test_a_name_that_the_process_chose_stands_before_the_script(
    script: str, comm: str, shown: str
) -> None:
    assert procfs.with_comm(script, comm) == shown
