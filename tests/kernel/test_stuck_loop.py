# SPDX-License-Identifier: Apache-2.0
"""A main loop that really hangs: in a read of /proc that never ends. The page shows it, and two
signals end the program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import IO

import pytest
from fuse_tenants import tenant

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="makes a device and acts as other users"),
]

STUCK = """
import sys
from sonde.agent import event_loop, exporters, top
exporters.STUCK_S = 2.0

def hang(*_):
    if len(sys.argv) > 2:
        print("it hangs", file=sys.stderr, flush=True)
        open("/proc/%s/stat" % sys.argv[1]).read()

for name in ("poll", "_update_unwinder"):
    setattr(event_loop.EventLoop, name, hang)
top.Top.look = hang
from sonde.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


def _started(kid: int, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", STUCK, str(kid), *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd="/tmp"
    )


def _line_with(output: IO[str] | None, text: str) -> str:
    """The first line that has it."""
    assert output is not None
    for line in output:
        if text in line:
            return line
    pytest.fail(f"it ended before it wrote {text!r}")


def _end(process: subprocess.Popen[str], *numbers: int) -> int | None:
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.3)
    try:
        return process.wait(2)
    except subprocess.TimeoutExpired:
        return None


def test_the_page_of_an_agent_whose_loop_hangs_shows_it() -> None:
    with tenant("exec") as hostile:
        agent = _started(hostile.kid, "agent", "--prometheus", "127.0.0.1:0", "--no-device")
        try:
            url = _line_with(agent.stderr, "metrics at").split()[-1]
            until_s = time.monotonic() + 30
            answer = None
            while answer is None and time.monotonic() < until_s:
                try:
                    with urllib.request.urlopen(url, timeout=5) as page:
                        text = page.read().decode()
                        assert "sonde_agent_loop_age_seconds" in text
                except urllib.error.HTTPError as error:
                    answer = error.code, error.read().decode()
                time.sleep(0.5)
            assert answer is not None
            assert answer[0] == 503
            assert "main loop is stuck" in answer[1]
            assert answer[1].count("\n") == 1
            assert _end(agent, signal.SIGTERM) is None, "it hangs"
            assert _end(agent, signal.SIGTERM) == 128 + signal.SIGTERM
        finally:
            agent.kill()
            agent.wait()


@pytest.mark.parametrize(
    ("numbers", "command"),
    [
        ((signal.SIGINT, signal.SIGINT), ["record", "-o", "/dev/null", "-f", "--no-device"]),
        ((signal.SIGINT, signal.SIGTERM), ["record", "-o", "/dev/null", "-f", "--no-device"]),
        ((signal.SIGINT, signal.SIGINT), ["top"]),
    ],
)
def test_a_second_signal_ends_what_hangs(numbers: list[int], command: list[str]) -> None:
    with tenant("exec") as hostile:
        process = _started(hostile.kid, *command)
        try:
            _line_with(process.stderr, "it hangs")
            time.sleep(0.5)
            assert process.poll() is None
            assert _end(process, numbers[0]) is None, "it hangs"
            assert _end(process, numbers[1]) == 128 + numbers[1]
            assert process.stderr is not None
            assert "sonde: aborted" in process.stderr.read()
        finally:
            process.kill()
            process.wait()


def test_the_first_signal_ends_what_does_not_hang() -> None:
    for command, is_at_work in (
        (["top"], "CPU"),
        (["record", "-o", "/dev/null", "-f", "--no-device"], "sonde: recording"),
    ):
        process = subprocess.Popen(
            [sys.executable, "-m", "sonde", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            _line_with(process.stdout, is_at_work)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=15)
            assert process.returncode == 0
        finally:
            process.kill()
            process.wait()
