# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C pressed twice loses no recording and leaves no temporary file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from sonde.query.capture import read

pytestmark = pytest.mark.bpf


def started(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "sonde", *map(str, arguments)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment},
    )


def line_with(process, words):
    for line in process.stderr:
        if words in line:
            return
    pytest.fail(f"no line with {words!r}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_recording_is_kept(number, tmp_path):
    path = tmp_path / "a.sonde"
    process = started("record", "-o", path, "--no-device")
    line_with(process, "recording the whole machine")
    time.sleep(1.5)
    process.send_signal(number)
    time.sleep(0.2)
    process.send_signal(number)
    assert process.wait(20) in (0, 128 + number)
    capture = read(path)
    assert capture.info.chunks >= 1
    assert capture.tables["sample"].num_rows


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_explain_leaves_no_temporary_file(number, count, tmp_path):
    process = started("explain", "--pid", os.getpid(), "--duration", "60", TMPDIR=str(tmp_path))
    try:
        until_s = time.monotonic() + 20
        while not [*tmp_path.glob("sonde-explain-*/live.sonde")]:
            assert time.monotonic() < until_s
            time.sleep(0.05)
        time.sleep(1.0)
        for _ in range(count):
            process.send_signal(number)
            time.sleep(0.02)
        process.wait(30)
        assert not [*tmp_path.iterdir()]
    finally:
        process.kill()
        process.wait()
