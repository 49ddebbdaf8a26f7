# SPDX-License-Identifier: Apache-2.0
"""`sonde job` and `sonde owners` at a real server with a capture of a real GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from served import Server
from sonde.server.upload import upload

CAPTURE = Path(__file__).parents[1] / "data" / "explain" / "own" / "cpu_quota.sonde"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("job") / "store") as server:
        upload(CAPTURE, f"http://127.0.0.1:{server.port}", "trainer-0")
        server.wait_for(3)
        yield server


def sonde(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    node = server.ask("nodes", **{"from": 0})[0]
    times = ["--from", f"{node['first_ns'] / 1e9 - 1:.3f}", "--to", f"{node['last_ns'] / 1e9:.3f}"]
    url = f"http://127.0.0.1:{server.port}"
    command = [sys.executable, "-m", "sonde", *arguments, "--server", url, *times]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_job_as_text_and_as_json(server: Server) -> None:
    text = sonde(server, "job", "root", "--by", "user")
    found = json.loads(sonde(server, "job", "root", "--by", "user", "--json").stdout)

    assert text.returncode == 0, text.stderr
    first, *lines = text.stdout.splitlines()
    assert first.startswith("user root: 1 GPU of 1 node, held 0.00")
    assert f"wasted {found['wasted_h']:.4f} h" in first
    assert any("run queue: the launching thread waited for a CPU" in line for line in lines)
    assert any(line.startswith("verdict on trainer-0, python3 (1097)") for line in lines)
    assert any(line.startswith("  next: reserve a CPU") for line in lines)
    assert any(line.startswith("not covered: checkpoints") for line in lines)


def test_owners_as_a_table(server: Server) -> None:
    done = sonde(server, "owners")

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["held", "wasted"] and lines[0].endswith("user")
    assert {line.rsplit("   ", 1)[1][3:] for line in lines[1:3]} == {"root", "(not known)"}


def test_a_job_that_nobody_knows_and_a_server_that_is_not_there(server: Server) -> None:
    nobody = sonde(server, "job", "4711")
    away = subprocess.run(
        [sys.executable, "-m", "sonde", "job", "1", "--server", "http://127.0.0.1:9"],
        capture_output=True, text=True,
    )  # fmt: skip

    assert nobody.returncode == 0 and "held a GPU in this time" in nobody.stdout
    assert away.returncode == 1 and "remedy: start it with `sonde serve`" in away.stderr
