# SPDX-License-Identifier: Apache-2.0
"""Runs the real recorder beside what a test starts, then opens what it wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from sonde.query.capture import Capture, CaptureInfo, read
from sonde.query.session import Session

PATIENCE_S = 60


class Recorder:
    """A recorder at work; once it has ended, its capture."""

    def __init__(self, path: Path, flags: list[str], settings: dict[str, str]) -> None:
        self.path = path
        command = [sys.executable, "-m", "sonde", "record", "--json", "-o", str(path), *flags]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.outcome: dict[str, Any] = {}
        self.complaints = ""
        self.ended = False

    def wait_until_attached(self) -> None:
        assert self.process.stderr is not None
        printed = ""
        for line in self.process.stderr:
            printed += line
            if line.startswith("sonde: recording"):
                return
        pytest.fail(f"the recorder did not start:\n{printed}")

    def end(self, how: signal.Signals = signal.SIGINT) -> int:
        """End it, unless it has ended, and read what it printed. Returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        output, self.complaints = self.process.communicate(timeout=PATIENCE_S)
        self.ended = True
        if output:
            self.outcome = json.loads(output)
        return self.process.returncode

    @cached_property
    def capture(self) -> Capture:
        return read(self.path)

    @cached_property
    def session(self) -> Session:
        return Session(self.capture)

    @property
    def info(self) -> CaptureInfo:
        return self.session.info

    def rows(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Ask the capture: `sample`, `activity`, `span`, `event`, `metric`, ..."""
        return self.session.rows(sql, parameters)

    def losses(self) -> dict[str, float]:
        return dict(
            self.rows("SELECT name, sum(value) FROM event WHERE kind = 'loss' GROUP BY name")
        )


class Record:
    """Starts recorders: `with record("-F", "997") as recorder: …`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    @contextmanager
    def __call__(
        self, *flags: str, path: Path | None = None, device: bool = False, **settings: Any
    ) -> Iterator[Recorder]:
        """Settings are those of the configuration: `tick_s=5`. It has ended when the block ends."""
        self._count += 1
        path = path or self._folder / f"{self._count}.sonde"
        environment = {f"SONDE_{name.upper()}": str(value) for name, value in settings.items()}
        recorder = Recorder(path, [*([] if device else ["--no-device"]), *flags], environment)
        try:
            recorder.wait_until_attached()
            yield recorder
            if not recorder.ended:
                assert recorder.end() == 0, recorder.complaints
        finally:
            if not recorder.ended:
                recorder.process.kill()
                recorder.process.communicate()


@pytest.fixture(scope="session")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    return Record(tmp_path_factory.mktemp("captures"))
