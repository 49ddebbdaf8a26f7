# SPDX-License-Identifier: Apache-2.0
"""Files that are dropped on the page: read by a real child, hostile ones refused."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from test_web_questions import unpacked

from captures import scene
from sonde import procfs
from sonde.limits import VARIABLE
from sonde.server import open_recording, opened
from sonde.server.children import Children
from sonde.server.opened import Opener
from sonde.server.service import RefusedRequestError


def given(folder: Path, content: bytes, declared_bytes: int = 0) -> Any:
    """What the page gets for a file."""

    async def parts() -> AsyncIterator[bytes]:
        for at in range(0, len(content), 1 << 16):
            yield content[at : at + (1 << 16)]

    with closing(Children()) as children:
        opener = Opener(folder, children)
        return unpacked(asyncio.run(opener.open("a", declared_bytes, parts())).content)


def test_a_capture_opens_with_its_stacks_and_waits(tmp_path: Path) -> None:
    found = given(tmp_path, scene().bytes())
    assert found["flames"]["cpu"]["total"]["n"] == 650
    flame = found["flames"]["blocked"]
    leaves = {flame["frames"][one["frames"][0]]["function"] for one in flame["stacks"]}
    assert "(futex)" in leaves
    assert found["timeline"]["tracks"]
    assert list(tmp_path.iterdir()) == []


def test_a_trace_of_torch_profiler_opens(tmp_path: Path) -> None:
    trace = Path(__file__).parents[1] / "data" / "explain" / "page_faults.json.gz"
    found = given(tmp_path, trace.read_bytes())
    assert found["flames"] == {}
    assert found["timeline"]["device"]["start"]
    assert found["timeline"]["explanation"]["verdicts"]


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"\x7fELF" * 100, "no known format"),
        (b"SONDE" + b"\xff" * 4000, ""),
        (gzip.compress(b'{"traceEvents":[' + b"[" * 100_000), ""),
    ],
)
def test_what_is_no_recording_is_refused_with_a_remedy(
    tmp_path: Path, content: bytes, cause: str
) -> None:
    with pytest.raises(RefusedRequestError) as refused:
        given(tmp_path, content)
    assert refused.value.status == 422
    assert cause in refused.value.cause
    assert "Traceback" not in refused.value.cause
    assert "/proc/" not in refused.value.cause


def test_a_child_that_goes_on_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened, "READ_S", 0.01)
    with pytest.raises(RefusedRequestError, match="limits"):
        given(tmp_path, scene().bytes())


def test_the_child_takes_a_part_of_the_container_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet ends all of a container that has reached its limit, not the child alone."""
    (tmp_path / "memory.max").write_text(f"{200 << 20}\n")
    (tmp_path / "memory.current").write_text("0\n")
    limit = procfs.memory_limit(os.getpid(), {"v2": str(tmp_path)})
    assert limit == 200 << 20
    monkeypatch.setattr(procfs, "memory_limit", lambda pid: limit)
    with pytest.raises(RefusedRequestError, match=r"memory|limits|cannot be read"):
        given(tmp_path, scene().bytes())
    limit = 1 << 30
    assert given(tmp_path, scene().bytes())["flames"]


def test_large_files_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "MAX_BYTES", 1000)
    for declared_bytes in (0, 5000):
        with pytest.raises(RefusedRequestError) as refused:
            given(tmp_path, b"x" * 5000, declared_bytes)
        assert refused.value.status == 413
    assert list(tmp_path.iterdir()) == []


def test_a_defect_of_a_reader_is_an_answer_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    def fail(path: Path) -> None:
        raise IndexError("a defect")

    monkeypatch.setattr(open_recording, "document", fail)
    for name in ("setrlimit", "nice"):
        monkeypatch.setattr(resource if name == "setrlimit" else os, name, nothing)
    monkeypatch.setattr(sys, "argv", ["", str(1 << 30), "10", str(1 << 20)])
    monkeypatch.setenv(VARIABLE, "")
    open_recording.main()
    sys.stdout.flush()
    answer = capfdbinary.readouterr().out
    assert answer[:1] == open_recording.BAD
    assert "IndexError" in json.loads(answer[1:])["error"]


def nothing(*_: object) -> None:
    """In place of what would hold for this process, too."""
