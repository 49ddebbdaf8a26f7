# SPDX-License-Identifier: Apache-2.0
"""Every CPython that Debian's suites have, each with the libc of its suite (scripts/pythons)."""

from __future__ import annotations

import ast
import io
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import test_stacks

from sonde import procfs
from sonde.export import folded
from sonde.model.profile import ProfileKind
from sonde.unwind.python_threads import MAX_NAME

pytestmark = pytest.mark.bpf

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests" / "programs" / "stacks" / "tree.py"
FOUND = sorted(ROOT.glob("build/pythons/*/root/usr/bin/python3.*"))


NAMED = ROOT / "tests" / "programs" / "python" / "named_threads.py"
SHARES = ROOT / "tests" / "programs" / "python" / "shares_lock.py"
COLLECTS = ROOT / "tests" / "programs" / "python" / "collects.py"


REFUSED = {
    "bullseye-python3.9": "older than any whose layout is known",
    "sid-python3.15": "newer than any whose layout is known",
}
"""Interpreters whose own frames are not walked; their native stacks are whole all the same."""


def name_of(python):
    return f"{python.parents[3].name}-{python.name}"


def recorded(record, python, program):
    """(recorder of 3 s of a program with its interpreter, what the program printed until it was
    asked to end)."""
    root = python.parents[2]
    shutil.copy(program, root / "tmp" / program.name)
    command = ["chroot", str(root), f"/usr/bin/{python.name}", f"/tmp/{program.name}", "60"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        time.sleep(1)
        with record(
            *("-F", str(test_stacks.HZ), "--no-device", "-p", str(process.pid), "-d", "3")
        ) as recorder:
            recorder.process.wait(60)
        process.terminate()
        return recorder, process.communicate(timeout=30)[0]
    finally:
        process.kill()
        process.wait()


def walked(record, python):
    """(stacks, last value of the counter of refused interpreters) of the known tree at work."""
    recorder, _ = recorded(record, python, SOURCE)
    refused = recorder.rows("SELECT max(value) FROM metric WHERE series LIKE '%python_refused'")
    return test_stacks.stacks(recorder), refused[0][0] or 0


@pytest.mark.parametrize("python", FOUND, ids=name_of)
def test_an_interpreter_is_walked_or_refused(record, python):
    seen, refused = walked(record, python)
    total = sum(count for _, _, count in seen)
    whole = sum(count for _, is_whole, count in seen if is_whole)
    kinds = {frame["kind"] for frames, _, _ in seen for frame in frames}
    assert total > 300
    assert whole / total >= test_stacks.WHOLE
    if name_of(python) in REFUSED:
        assert "python" not in kinds
        assert refused > 0
        return
    paths = [
        ([it["function"] for it in frames if it["kind"] == "python"], count)
        for frames, is_whole, count in seen
        if is_whole
    ]
    leaves = [(path, count) for path, count in paths if path[-1:] == ["leaf"]]
    wrong = Counter({tuple(path): n for path, n in leaves if not test_stacks.is_right_python(path)})
    all_leaves = sum(count for _, count in leaves)
    assert all_leaves > total / 2
    assert wrong.total() <= all_leaves * (1 - test_stacks.RIGHT), wrong.most_common(3)


def dumped_names(pid):
    command = [sys.executable, "-m", "sonde", "dump", str(pid), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return {it["tid"]: it["name"] for it in json.loads(done.stdout)["threads"]}


@pytest.mark.parametrize("python", FOUND, ids=name_of)
def test_threads_have_the_names_that_the_program_gave_them(python):
    root, pipe = python.parents[2], subprocess.PIPE
    shutil.copy(NAMED, root / "tmp" / NAMED.name)
    command = ["chroot", str(root), f"/usr/bin/{python.name}", f"/tmp/{NAMED.name}"]
    # In a pid namespace, where threads have other ids than those that the kernel reports.
    process = subprocess.Popen(["unshare", "--pid", "--fork", *command], stdin=pipe, stdout=pipe)
    try:
        names = ast.literal_eval(process.stdout.readline().decode())
        (pid,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        dumped = dumped_names(pid)
        comm = Path(f"/proc/{pid}/comm").read_text().strip()
    finally:
        process.communicate()
    assert dumped.pop(int(pid)) == comm
    if name_of(python) in REFUSED:
        return
    shown = [procfs.text(name.encode())[:MAX_NAME] for name in names.values()]
    assert sorted(["MainThread", *dumped.values()]) == sorted(shown)


@pytest.mark.parametrize("python", FOUND, ids=name_of)
def test_the_garbage_collector_has_a_name_in_a_stripped_interpreter(record, python):
    """The truth is the interpreter's own callbacks."""
    recorder, printed = recorded(record, python, COLLECTS)
    truth = float(printed)
    seen = test_stacks.stacks(recorder)
    total = sum(count for _, _, count in seen)
    collecting = sum(
        count for frames, _, count in seen if any(it["function"] == "gc_collect" for it in frames)
    )
    assert total > 300
    assert 0.1 < truth < 0.9
    assert collecting / total == pytest.approx(truth, abs=0.08)


@pytest.mark.parametrize("python", FOUND, ids=name_of)
def test_waits_for_the_interpreter_lock_have_its_name_in_a_stripped_interpreter(record, python):
    recorder, _ = recorded(record, python, SHARES)
    out = io.BytesIO()
    folded.write(recorder.session, out, kinds=(ProfileKind.OFF_CPU,))
    lines = [line.rpartition(" ") for line in out.getvalue().decode().splitlines()]
    # The main thread waits for the two: the same function, another lock.
    waits = [(stack, int(us)) for stack, _, us in lines if "pthread_cond" in stack]
    named = sum(us for stack, us in waits if ";take_gil;" in stack)
    assert named > 1_000_000
    assert named > 0.95 * sum(us for _, us in waits), waits
