# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that explain captures made by hand (training_capture.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from captures import Writer
    from sonde.model.verdict import Verdict


@pytest.fixture
def writer() -> Writer:
    """Of a capture of 5 s."""
    from captures import Writer  # with pyarrow, which most tests do not load

    return Writer(seconds=5)


@pytest.fixture
def key(writer: Writer) -> dict[str, int]:
    """A process 42 that trains, in a thread of that number."""
    threads = [{"tid": 42, "comm": "train"}, {"tid": 50, "comm": "x"}]
    return writer.process(42, "train", threads=threads)


@pytest.fixture
def verdicts(writer: Writer, tmp_path: Path) -> Callable[[], list[Verdict]]:
    """The verdicts on what the writer has when it is called."""
    from sonde.analyze.bound import explain
    from sonde.recording.timelines import open_timeline

    def explained() -> list[Verdict]:
        return explain(open_timeline([writer.write(tmp_path / "a.sonde")])).verdicts

    return explained


@pytest.fixture
def explained(verdicts: Callable[[], list[Verdict]]) -> Callable[[], Verdict]:
    """The first of these verdicts."""
    return lambda: verdicts()[0]
