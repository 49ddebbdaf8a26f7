# SPDX-License-Identifier: Apache-2.0
"""Processes that are named on the command line by what they run."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sonde.cli import explain
from sonde.cli.main import main
from sonde.cli.named_processes import (
    Recorded,
    pid_of,
    pids_in_record,
    pids_of,
    process_name,
    processes_of,
    refuse_of_kernel,
)
from sonde.errors import UsageError

Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a Python script with a name, and waits until it runs."""
    with ExitStack() as kept:

        def started(name: str, code: str = "", *arguments: str) -> int:
            script = tmp_path / name
            script.write_text(f"{code}\nprint(flush=True)\ninput()\n")
            process = kept.enter_context(
                subprocess.Popen(
                    [sys.executable, script, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            kept.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()
            return process.pid

        yield started


def test_a_script_is_named_with_or_without_its_ending_and_path(start: Start) -> None:
    pid = start("named_once_here.py")

    assert pid_of("named_once_here.py") == pid
    assert pid_of("named_once_here") == pid
    assert pid_of("somewhere/named_once_here.py") == pid
    assert pids_of([pid, "named_once_here.py"]) == [pid]


def test_of_several_none_is_chosen_and_all_are_listed(start: Start) -> None:
    pids = [start("named_twice_here.py", "", "--password", "hunter2") for _ in range(2)]

    with pytest.raises(UsageError) as caught:
        pid_of("named_twice_here.py")
    assert all(f"{pid} (" in caught.value.cause for pid in pids)
    assert "named_twice_here.py …" in caught.value.cause
    assert "hunter2" not in caught.value.cause


def test_a_program_with_its_workers_is_one(start: Start) -> None:
    fork = "import os, time\nif not os.fork():\n    time.sleep(60)\n"
    pid = start("named_with_workers.py", fork)
    time.sleep(0.1)

    assert pid_of("named_with_workers.py") == pid
    subprocess.run(["pkill", "-P", str(pid)], check=True)


@pytest.mark.parametrize("name", ["hunter2", "named_arg", "no-such-program"])
def test_arguments_are_not_searched(start: Start, name: str) -> None:
    start("named_for_arguments.py", "", "hunter2", "--named_arg")

    with pytest.raises(UsageError, match="no process that runs is called"):
        pid_of(name)


@pytest.mark.parametrize("text", ["", " ", "-3", "+3", "4294967296", "x" * 300])
def test_what_is_neither_a_number_nor_a_name_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        process_name(text)


def test_names_in_a_record() -> None:
    known = {11: Recorded("python3"), 12: Recorded("nginx"), 13: Recorded("nginx")}

    assert pids_in_record(["python3", 12, 12], known, "a.sonde", {15: 12}) == (11, 12)
    with pytest.raises(UsageError, match=r"2 processes are called nginx: 12 \(nginx\), 13"):
        pids_in_record(["nginx"], known, "a.sonde", {15: 12})
    with pytest.raises(UsageError, match=r"a\.sonde saw no process 14"):
        pids_in_record([14], known, "a.sonde", {15: 12})
    with pytest.raises(UsageError, match=r"15 is a thread of process 12"):
        pids_in_record([15], known, "a.sonde", {15: 12})
    with pytest.raises(UsageError, match=r"a\.sonde saw no process called redis"):
        pids_in_record(["redis"], known, "a.sonde", {15: 12})


def test_a_script_in_a_record_is_named_by_script_rank_or_interpreter() -> None:
    def process(shown: str, parent: int) -> Recorded:
        return Recorded(
            shown, (shown.partition(" of ")[0] if " of " in shown else "python3",), parent
        )

    known = {
        10: process("-m torch.distributed.run", 1),
        20: process("train.py rank 0", 10),
        21: process("pt_data_worker of train.py rank 0", 20),
        30: process("train.py rank 1", 10),
        40: process("serve.py", 1),
        41: process("serve.py", 40),
    }

    def found(name: str) -> tuple[int, ...]:
        return pids_in_record([name], known, "a.sonde", {})

    assert found("train.py rank 1") == (30,)
    assert found("torch.distributed.run") == (10,)
    assert found("pt_data_worker") == (21,)
    assert found("serve") == found("serve.py") == found("/srv/serve.py") == (40, 41)
    with pytest.raises(UsageError, match=r"2 processes are called train: 20 \(train.py rank 0\)"):
        found("train")
    with pytest.raises(UsageError, match=r"no process called trian.py \(did you mean train.py\?\)"):
        found("trian.py")
    with pytest.raises(UsageError, match=r"no process called serv \(did you mean serve.py\?\)"):
        found("serv")
    with pytest.raises(UsageError, match=r"no process called redis \(choose"):
        found("redis")


def test_a_name_that_no_running_process_has_brings_a_similar_one(start: Start) -> None:
    start("named_almost_so.py")

    with pytest.raises(UsageError, match=r"did you mean named_almost_so\.py\?"):
        pid_of("named_almots_so.py")
    with pytest.raises(UsageError, match=r"did you mean named_almost_so\.py\?"):
        pid_of("Almost_so")


@pytest.mark.parametrize(
    ("command", "proposed"),
    [
        ("explain", "sonde explain --pid asked_as_file.py"),
        ("report", "sonde record -p asked_as_file.py"),
        ("record", "sonde record -p asked_as_file.py"),
        ("top", "do you mean -p asked_as_file.py?"),
    ],
)
@pytest.mark.parametrize("is_there", [True, False])
def test_a_script_in_place_of_a_file_is_answered_with_the_process(
    start: Start, tmp_path, monkeypatch, capsys, command, proposed, is_there
) -> None:
    start("asked_as_file.py")
    if not is_there or command == "report":
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
    else:
        monkeypatch.chdir(tmp_path)
    try:
        assert main([command, "asked_as_file.py"]) != 0
    except SystemExit as ended:
        assert ended.code == 2
    assert proposed in capsys.readouterr().err


def test_a_file_of_no_process_is_just_missing(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "nobody_runs_this.py"]) == 1
    assert "--pid" not in capsys.readouterr().err


def test_a_thread_stands_for_its_process_with_a_note(start: Start, monkeypatch, capsys) -> None:
    sleeps = "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    code = f"import threading, time\n{sleeps}"
    pid = start("with_a_thread.py", code)
    (tid,) = (int(one.name) for one in Path(f"/proc/{pid}/task").iterdir() if one.name != str(pid))

    pids, (note,) = processes_of([tid, pid])
    assert pids == [pid]
    assert note.startswith(f"{tid} is a thread of process {pid} (")
    assert "with_a_thread.py" in note

    class RecordingError(Exception):
        """In place of a recording, which needs root."""

    def recorded(pids, seconds):
        assert pids == [pid]
        raise RecordingError

    monkeypatch.setattr(explain, "_recorded", recorded)
    with pytest.raises(RecordingError):
        explain.run(argparse.Namespace(files=[], pids=[tid], duration=1.5, quiet=False))
    shown = capsys.readouterr().err
    assert f"{tid} is a thread of process {pid}" in shown
    assert f"sonde: recording 1.5 s of with_a_thread.py ({pid}), then analysing it\n" in shown


def test_a_thread_of_the_kernel_is_refused() -> None:
    with pytest.raises(UsageError) as refused:
        refuse_of_kernel([2])
    assert "thread of the kernel" in refused.value.cause
    assert refused.value.remedy.endswith("sonde record -p 2")
