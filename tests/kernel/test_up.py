# SPDX-License-Identifier: Apache-2.0
"""`sonde up` for real: one command watches, remembers, answers, and outlives kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

pytestmark = pytest.mark.bpf

ANSWERS_S = 60.0
"""It takes some 8 s; three times as much to run as there are cores makes that 20 to 40 s."""


class Up:
    """A running `sonde up`, as from a shell that gave it a separate process group."""

    started: ClassVar[list[Up]] = []

    def __init__(self, state: Path, *flags: str) -> None:
        self.state = state
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sonde", "up", "--state", str(state)),
                *("--listen", "127.0.0.1:0", *flags),
            ],
            stdout=subprocess.PIPE,
            stderr=(state.parent / "up.log").open("a"),
            text=True,
            start_new_session=True,
        )
        self.started.append(self)
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert "watching this machine" in line, (state.parent / "up.log").read_text()
        self.url = line.split()[-1]

    def ask(self, question: str, token: str = "", **parameters: object) -> object:
        query = "&".join(f"{name}={value}" for name, value in parameters.items())
        token = token or (self.state / "token").read_text().strip()
        request = urllib.request.Request(
            f"{self.url}/v1/{question}?{query}", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)

    def chunks(self, start_s: float = 0) -> int:
        nodes = self.ask("nodes", **{"from": start_s})
        assert isinstance(nodes, list)
        return sum(node["chunks"] for node in nodes)

    def wait_for(self, chunks: int, start_s: float = 0) -> float:
        """Seconds since the start until that many chunks can be asked for."""
        while True:
            try:
                if self.chunks(start_s) >= chunks:
                    return time.monotonic() - self.started_s
            except OSError:  # the server is being started again
                pass
            assert time.monotonic() - self.started_s < 2 * ANSWERS_S
            time.sleep(0.2)

    def children(self) -> dict[str, int]:
        """Process id by the name of the command."""
        task = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        found = {}
        for pid in Path(task).read_text().split():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            for name in ("serve", "agent"):
                if name.encode() in words:
                    found[name] = int(pid)
        return found

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(40)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    tmp_path.chmod(0o700)
    yield tmp_path / "state"
    for up in Up.started:  # of a test that failed
        if up.process.poll() is None:
            up.end(signal.SIGTERM)
    Up.started.clear()


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until_gone(pids: list[int]) -> None:
    ends = time.monotonic() + 20
    while any(is_there(pid) for pid in pids):
        assert time.monotonic() < ends, "children outlive their parent"
        time.sleep(0.1)


def test_it_answers_soon_and_its_history_survives_restarts_and_kills(state: Path) -> None:
    up = Up(state)
    answered_s = up.wait_for(1)
    print(f"answered after {answered_s:.1f} s")
    assert answered_s < ANSWERS_S
    top = up.ask("top", **{"from": 0})
    assert isinstance(top, list) and top
    with pytest.raises(urllib.error.HTTPError, match="401"):
        up.ask("top", token="sonde_guessed")
    children = list(up.children().values())
    assert len(children) == 2
    assert up.end(signal.SIGINT) == 0
    until_gone(children)

    again_s = time.time()
    up = Up(state)
    before = up.chunks()
    assert before >= 1
    for number in up.children().values():
        os.kill(number, signal.SIGKILL)
    up.started_s = time.monotonic()
    up.wait_for(1, again_s)
    assert up.chunks() > before
    children = list(up.children().values())
    assert len(children) == 2
    assert up.end(signal.SIGKILL) == -signal.SIGKILL
    until_gone(children)


def test_it_ends_by_itself_and_prints_what_it_saw(state: Path) -> None:
    up = Up(state, "--for", "6s")
    output, _ = up.process.communicate(timeout=60)

    assert up.process.returncode == 0
    assert "samples of CPU time" in output
    assert output.count("%") >= 1


def test_a_port_that_is_taken_is_reported_once(state: Path) -> None:
    up = Up(state)
    port = up.url.rsplit(":", 1)[1]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sonde", "up", "--state", f"{state}2"),
            *("--listen", f"127.0.0.1:{port}"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert up.end(signal.SIGTERM) == 0

    assert done.returncode == 2
    assert "cannot listen on" in done.stderr
    assert "Traceback" not in done.stderr
