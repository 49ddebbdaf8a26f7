# SPDX-License-Identifier: Apache-2.0
"""A second signal waits a moment for what would be lost, removes temporary files, then aborts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
from pathlib import Path
from sonde.cli.abort_signals import AbortOnSecondSignal
saved_s, folder = float(sys.argv[1]), Path(sys.argv[2])
import signal
first = []
signal.signal(signal.SIGINT, lambda *_: first.append(time.monotonic()))
signal.signal(signal.SIGTERM, lambda *_: first.append(time.monotonic()))
with AbortOnSecondSignal() as abort:
    saved = folder / "saved"
    abort.patience_s = lambda: 0.0 if saved.exists() else 1.0
    abort.clean_up = (folder / "temporary").unlink
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
        if first and time.monotonic() > first[0] + saved_s:
            saved.touch()
"""


@pytest.mark.parametrize(
    ("saved_s", "signals", "least_s", "most_s"),
    [
        (0.4, 2, 0.2, 0.95),  # waits until it is saved
        (60.0, 2, 0.9, 4.0),  # what hangs is waited for no longer
        (60.0, 3, 0.0, 0.9),  # a third signal ends the wait
        (0.0, 2, 0.0, 0.9),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_loses_nothing_that_is_written_soon(
    number: int, saved_s: float, signals: int, least_s: float, most_s: float, tmp_path: Path
) -> None:
    (tmp_path / "temporary").touch()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(saved_s), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        for _ in range(signals):
            process.send_signal(number)
            time.sleep(0.1)
        began_s = time.monotonic()
        assert process.wait(10) == 128 + number
        took_s = time.monotonic() - began_s
        assert least_s - 0.1 <= took_s <= most_s
        assert "sonde: aborted" in process.stderr.read()
        assert (tmp_path / "saved").exists() == (saved_s < 1)
        assert not (tmp_path / "temporary").exists()
    finally:
        process.kill()
        process.wait()
