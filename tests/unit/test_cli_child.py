# SPDX-License-Identifier: Apache-2.0
"""The command after `--`: held back until it may start, then itself and nothing else."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from sonde.cli.child import Child, environment_before_sudo, invoking_user
from sonde.errors import CommandNotExecutable, CommandNotFound, UsageError

NOBODY = pwd.getpwnam("nobody")
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="changes user")


def test_nothing_runs_before_start(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    child = Child(["touch", str(mark)])
    time.sleep(0.1)
    assert not mark.exists()
    assert not child.reap()

    child.start()
    child.reap(wait=True)

    assert mark.exists()
    assert child.how_it_ended() == "exited with 0"


def test_the_pid_is_the_commands_own(tmp_path: Path) -> None:
    out = tmp_path / "pid"
    child = Child(["sh", "-c", f"echo $$ >{out}"])
    child.start()
    child.reap(wait=True)

    assert int(out.read_text()) == child.pid


def test_an_abandoned_command_never_runs(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    child = Child(["touch", str(mark)])

    child.abandon()

    assert child.reap()
    assert not mark.exists()


def test_a_command_dies_with_a_recorder_that_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    program = f"""
        import os, signal
        from sonde.cli.child import Child
        child = Child(["touch", {str(mark)!r}])
        print(child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    recorder = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    pid = int(recorder.stdout)

    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.02)
    else:
        pytest.fail(f"{pid} still waits")
    assert not mark.exists()


def test_exit_codes_and_signals_are_distinguished() -> None:
    left = Child(["sh", "-c", "exit 3"])
    left.start()
    left.reap(wait=True)
    killed = Child(["sleep", "60"])
    killed.start()
    assert killed.how_it_ended() == f"still runs (pid {killed.pid})"
    killed.send(signal.SIGTERM)
    killed.reap(wait=True)

    assert left.how_it_ended() == "exited with 3"
    assert killed.how_it_ended() == "was ended by SIGTERM"
    killed.send(signal.SIGTERM)  # does no harm


def test_a_missing_program_is_wrong_use() -> None:
    with pytest.raises(CommandNotFound, match="no program sonde-does-not-exist"):
        Child(["sonde-does-not-exist"])


def test_what_the_kernel_will_not_execute_is_wrong_use(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF, but not really")
    program.chmod(0o755)
    child = Child([str(program)])

    with pytest.raises(CommandNotExecutable, match=r"cannot run .*Exec format error"):
        child.start()


def test_nobody_called_sudo_unless_the_environment_shows_it() -> None:
    assert invoking_user({}) is None
    assert invoking_user({"SUDO_UID": "0"}) is None
    assert invoking_user({"SUDO_UID": "what"}) is None


@AS_ROOT
@pytest.mark.parametrize("caller", ["3999999999", "99999999999999999999999999"])
def test_what_an_unknown_user_meant_to_run_does_not_run_as_root(caller: str) -> None:
    with pytest.raises(UsageError, match=f"no user {caller}, who called sudo"):
        invoking_user({"SUDO_UID": caller})


@AS_ROOT
def test_under_sudo_the_command_is_the_callers() -> None:
    environ = {"SUDO_UID": str(NOBODY.pw_uid), "PATH": os.defpath, "SUDO_COMMAND": "sonde"}
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to others
        Path(folder).chmod(0o777)
        out = Path(folder) / "who"
        child = Child(
            ["sh", "-c", f"(id -un; env; grep CapEff /proc/self/status) >{out} 2>&1"], environ
        )
        child.start()
        child.reap(wait=True)
        seen = out.read_text()

    assert seen.startswith("nobody\n")
    assert f"HOME={NOBODY.pw_dir}" in seen
    assert "SUDO_" not in seen
    assert "CapEff:\t0000000000000000" in seen


def test_the_environment_is_the_one_that_sudo_was_called_with(tmp_path: Path) -> None:
    # A process that is called sudo, with a child whose own environment was cleared.
    sudo = tmp_path / "sudo"
    sudo.symlink_to(sys.executable)
    program = (
        "import subprocess, sys;"
        "p = subprocess.Popen(['sleep', '60'], env={});"
        "print(p.pid, flush=True); sys.stdin.read(); p.kill()"
    )
    with subprocess.Popen(
        [sudo, "-c", program],
        env={"VIRTUAL_ENV": "/home/me/venv", "PATH": os.defpath},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())

        environ = environment_before_sudo(NOBODY, {"PATH": "/cleared"}, pid)

        process.communicate("")
    assert environ["VIRTUAL_ENV"] == "/home/me/venv"
