# SPDX-License-Identifier: Apache-2.0
"""Processes whose first thread has ended before others: /proc/PID shows no memory of theirs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sonde import procfs

pytestmark = pytest.mark.bpf

SOURCE = Path(__file__).parents[1] / "programs" / "stacks" / "headless.c"
WHOLE_AND_NAMED = 0.95
SECONDS = "5"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or pytest.skip("needs gcc")
    path = tmp_path_factory.mktemp("headless") / "headless"
    flags = ["-O1", "-g0", "-fomit-frame-pointer", "-fno-optimize-sibling-calls"]
    subprocess.run([compiler, *flags, "-o", path, SOURCE, "-lpthread"], check=True)
    return path


@contextmanager
def running(program: Path, *arguments: str) -> Iterator[int]:
    """A process whose first thread has ended."""
    with subprocess.Popen([str(program), *arguments]) as process:
        time.sleep(0.2)
        yield process.pid
        process.kill()


def burned(recorder, pid):
    """Of the samples of a process: all, and those whose stack leads whole to a named function."""
    rows = recorder.capture.tables
    samples = [it for it in rows["sample"].to_pylist() if it["kind"] == "cpu" and it["pid"] == pid]
    names = {it["frame_id"]: it["function"] for it in rows["frame"].to_pylist()}
    stacks = {it["stack_id"]: it for it in rows["stack"].to_pylist()}
    total = good = 0
    for it in samples:
        total += it["weight_count"]
        stack = stacks.get(it["stack_id"])
        known = {names[frame] for frame in stack["frame_ids"]} if stack else set()
        if stack and stack["complete"] and known & {"first_work", "second_work"}:
            good += it["weight_count"]
    return total, good


def test_memory_of_such_a_process_is_seen_through_another_thread(program: Path) -> None:
    with running(program, SECONDS) as pid:
        assert procfs.memory_task(pid) != pid
        stat = procfs.read_stat(pid)
        assert stat is not None
        assert stat.goes_on
        assert stat.start_code
        assert stat.resident_bytes
        assert procfs.read_exe(pid) == "headless"
        assert b"/headless\n" in (procfs.read_maps(pid) or b"")
        memory = procfs.HeldFile(f"/proc/{pid}/mem")
        assert memory.read_at(4, stat.start_code & ~0xFFF)
        memory.close()
        line = next(
            it for it in (procfs.read_maps(pid) or b"").decode().split("\n") if "/headless" in it
        )
        fd = procfs.open_regular(f"/proc/{pid}/map_files/{line.split()[0]}", follow=True)
        assert fd is not None


def test_a_recording_of_it_is_whole_and_named(record, program: Path) -> None:
    with running(program, "60") as pid:
        for _ in range(2):  # its tables are made in the first
            with record("-F", "499", "-p", str(pid), "-d", "3") as recorder:
                recorder.process.wait(30)
    total, good = burned(recorder, pid)
    assert total > 300
    assert good / total >= WHOLE_AND_NAMED, (good, total)


def test_one_that_loses_its_first_thread_meanwhile_is_whole(record, program: Path) -> None:
    with record("-F", "499", "--", str(program), "8", "2") as recorder:
        recorder.process.wait(40)
    pids = {it["pid"] for it in recorder.capture.tables["sample"].to_pylist()}
    total, good = max(burned(recorder, pid) for pid in pids)
    assert total > 1000
    assert good / total >= WHOLE_AND_NAMED, (good, total)


def test_a_dump_of_it_shows_its_threads(program: Path) -> None:
    with running(program, "60") as pid:
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-m", "sonde", "dump", str(pid), "--json"],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
    assert done.returncode == 0, done.stderr
    assert "first_work" in done.stdout
    assert "second_work" in done.stdout
    states = {it["tid"]: it["state"] for it in json.loads(done.stdout)["threads"]}
    assert states.pop(pid) == "Z"
    assert "Z" not in states.values()
