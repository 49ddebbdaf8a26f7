# SPDX-License-Identifier: Apache-2.0
"""`sonde record -- CMD` as an ordinary user: device time of the command and its children."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sonde.query.capture import read
from sonde.query.session import Session

pytestmark = [
    pytest.mark.opencl,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else"),
    pytest.mark.skipif(not list(Path("/etc/OpenCL/vendors").glob("*.icd")), reason="needs PoCL"),
]
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
# The interpreter of a virtual environment may lie where only its owner can reach it.
PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable

Record = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where an ordinary user may write; pytest's own folders are root's alone."""
    folder = Path("/var/tmp") / f"sonde-nobody-{os.getpid()}"
    folder.mkdir()
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def record(folder: Path, program: Callable[..., Path]) -> Record:
    """Records what follows `--` as nobody; copies, an OpenCL program, lies in the folder."""
    shutil.copy(program("opencl/copies", "-lOpenCL"), folder)

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(p for p in sys.path if p)
        environ = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": path} | more
        done = subprocess.run(
            [*NOBODY, PYTHON, "-m", "sonde", "record", *arguments],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
        )
        if "No module named" in done.stderr:
            pytest.skip("an ordinary user cannot import what is tested here")
        return done

    return run


def total(path: Path) -> tuple[float, float]:
    """Estimated device runs, and the standard error of that."""
    ((count, variance),) = Session(read(path)).rows(
        "SELECT sum(weight), sum(weight * (weight - 1)) FROM device_run"
    )
    return count, variance**0.5


def runs(path: Path) -> dict[int, float]:
    """Estimated device runs by process."""
    rows = Session(read(path)).rows("SELECT pid, sum(weight) FROM device_run GROUP BY pid")
    return dict(rows)


def test_the_device_time_of_a_program(folder: Path, record: Record) -> None:
    done = record("-o", "x.sonde", "--", "./copies", "200000")

    assert done.returncode == 0, done.stderr
    assert "device time alone: recording needs the capabilities CAP_BPF" in done.stderr
    assert "remedy: " in done.stderr
    assert "GPU TIME" in done.stdout
    copies, error = total(folder / "x.sonde")
    # And what was under way at the begin and the end.
    assert abs(copies - 200_000) < 4 * error + 0.03 * 200_000


def test_children_are_in_the_same_capture(folder: Path, record: Record) -> None:
    done = record("-o", "x.sonde", "--", "sh", "-c", "./copies 200000 & ./copies 200000; wait")

    assert done.returncode == 0, done.stderr
    assert len(runs(folder / "x.sonde")) == 2


def test_a_program_without_a_device_stays_as_it_is(folder: Path, record: Record) -> None:
    """With a second thread it could not enter another user namespace."""
    done = record("-o", "x.sonde", "--", "unshare", "--user", "true")

    assert "unshare failed" not in done.stderr
    assert "exited with 0" in done.stderr


def test_json_holds_what_there_was(folder: Path, record: Record) -> None:
    done = record("--json", "-o", "x.sonde", "--", "./copies", "100")

    outcome = json.loads(done.stdout[done.stdout.index("{") :])
    assert outcome["samples"] == 0
    assert outcome["command"]["status"] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["-d", "1"],
        ["--no-device-time", "-o", "x.sonde", "--", "true"],
        ["--no-device", "-o", "x.sonde", "--", "true"],
        ["-p", "1"],
    ],
)
def test_where_nothing_could_be_seen_it_is_refused(record: Record, arguments: list[str]) -> None:
    done = record(*arguments)

    assert done.returncode == 3
    assert "CAP_BPF and CAP_PERFMON" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_that_opted_out_is_given_nothing(folder: Path, record: Record) -> None:
    done = record("-o", "x.sonde", "--", "./copies", "1000", SONDE_MAY_ATTACH="off")

    assert done.returncode == 0, done.stderr
    assert runs(folder / "x.sonde") == {}
