# SPDX-License-Identifier: Apache-2.0
"""Stacks against programs whose call trees are known."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.bpf

PROGRAMS = Path(__file__).parents[1] / "programs" / "stacks"
HZ = 997
WHOLE, RIGHT = 0.99, 0.999

MAIN = ["_start", "__libc_start_main", "__libc_start_call_main", "main"]
THREAD = ["clone3", "start_thread", "thread_entry"]


def is_interpreter(path):
    """Not one of pyenv's scripts, which run an interpreter that is found by itself."""
    with path.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            return False
    return subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0


PYTHONS = [
    path
    for version in ("3.10", "3.11", "3.12", "3.13", "3.14")
    for path in (
        *filter(None, [shutil.which(f"python{version}")]),
        *Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"),
    )
    if is_interpreter(Path(path))
]


def stacks(recorder):
    """(frames from the entry on, whether whole, samples) of the busiest process's CPU stacks."""
    tables = recorder.capture.tables
    samples = [row for row in tables["sample"].to_pylist() if row["kind"] == "cpu"]
    used: Counter[int] = Counter()
    weight: Counter[int] = Counter()
    for row in samples:
        used[row["pid"]] += row["weight_count"]
    ((pid, _),) = used.most_common(1)
    for row in samples:
        if row["pid"] == pid:
            weight[row["stack_id"]] += row["weight_count"]
    known = {row["frame_id"]: row for row in tables["frame"].to_pylist()}
    rows = {row["stack_id"]: row for row in tables["stack"].to_pylist()}
    found = []
    for stack, count in weight.items():
        row = rows.get(stack, {"frame_ids": [], "complete": False})
        frames = [known[it] for it in reversed(row["frame_ids"])]
        found.append(([it for it in frames if it["kind"] != "kernel"], row["complete"], count))
    return found


def names(frames):
    return [it["function"].removesuffix(".cold") for it in frames]


@pytest.fixture(scope="module")
def tree(tmp_path_factory, record):
    """A program that Sonde has met before: until its table is made, once, frame pointers lead."""
    compiler = shutil.which("g++") or pytest.skip("needs g++")
    program = tmp_path_factory.mktemp("stacks") / "tree"
    flags = ["-O2", "-g0", "-fomit-frame-pointer", "-fno-optimize-sibling-calls", "-mavx2"]
    source = PROGRAMS / "tree.cpp"
    subprocess.run([compiler, *flags, "-o", program, source, "-lpthread"], check=True)
    with record("--", str(program), "1", "5") as recorder:
        recorder.process.wait(30)
    return program


def is_right(path, depth):
    """Whether a path to `spin` is one that the program has."""
    if path[:1] == THREAD[1:2]:  # walked by frame pointers, as far as they lead
        path = [THREAD[0], *path]
    if path[: len(THREAD)] == THREAD:
        return path[3:] in (["recurse"] * 21 + ["spin"], ["variable_frame", "spin"])
    if path[: len(MAIN)] != MAIN:
        return False
    rest = path[len(MAIN) : -1]
    if rest[0] == "sorter":
        between = [it for it in rest[1:-1] if not it.startswith(("qsort", "msort"))]
        return rest[-1] == "compare" and not between
    if rest[0] == "signaller":
        return rest[-2:] == ["on_signal", "handler_work"] and "raise" in rest
    return rest in (
        ["recurse"] * (depth + 1),
        ["catcher", "thrower"],
        ["catcher"],
        ["variable_frame"],
        ["realigned"],
    )


@pytest.mark.parametrize("depth", [5, 500])
def test_native_call_trees_are_whole_and_right(record, tree, depth):
    with record("-F", str(HZ), "--", str(tree), "3", str(depth)) as recorder:
        recorder.process.wait(30)
    seen = stacks(recorder)
    total = sum(count for _, _, count in seen)
    whole = sum(count for _, is_whole, count in seen if is_whole)
    spinning = [(names(it), n) for it, whole, n in seen if whole and names(it)[-1:] == ["spin"]]
    right = sum(count for path, count in spinning if is_right(path, depth))
    wrong = Counter({tuple(p): n for p, n in spinning if not is_right(p, depth)}).most_common(3)
    assert total > 300
    assert whole / total >= WHOLE
    assert right / sum(count for _, count in spinning) >= RIGHT, wrong


@pytest.fixture(scope="module")
def met(record):
    """As on a machine where Sonde met these interpreters before: making the table of one takes some
    50 ms, once, and until then its stacks are walked by frame pointers."""
    source = PROGRAMS / "tree.py"
    together = "".join(f"{shlex.quote(str(python))} {source} 2 & " for python in PYTHONS)
    with record("-F", str(HZ), "--", "sh", "-c", f"{together} wait") as recorder:
        recorder.process.wait(60)


@pytest.mark.usefixtures("met")
@pytest.mark.parametrize("python", PYTHONS, ids=str)
def test_python_call_trees_are_whole_and_right(record, python):
    source = PROGRAMS / "tree.py"
    with record("-F", str(HZ), "--", str(python), str(source), "6") as recorder:
        recorder.process.wait(30)
    seen = stacks(recorder)
    total = sum(count for _, _, count in seen)
    whole = sum(count for _, is_whole, count in seen if is_whole)
    paths = [
        ([it["function"] for it in frames if it["kind"] == "python"], frames, count)
        for frames, _, count in seen
    ]
    paths = [
        it for it in paths if it[1][:1] and it[1][0]["function"] in ("_start", "clone3", "clone")
    ]
    leaves = [(path, frames, n) for path, frames, n in paths if path[-1:] == ["leaf"]]
    wrong = Counter({tuple(p): n for p, _, n in leaves if not is_right_python(p)})
    lines = {
        (it["function"], it["line"])
        for frames, _, _ in seen
        for it in frames
        if it["kind"] == "python" and it["file"].endswith("tree.py")
    }
    origins = {
        (it["binary"] if it["kind"] == "user" else Path(it["file"]).name, it["origin"])
        for frames, _, _ in seen
        for it in frames
    }
    assert {("tree.py", "program"), ("libc.so.6", "system")} <= origins
    text = source.read_text().splitlines()
    assert total > 300
    assert whole / total >= WHOLE
    assert 1 - wrong.total() / sum(n for _, _, n in leaves) >= RIGHT, wrong.most_common(3)
    for function, line in lines:
        if function == "key":
            assert "leaf(30)" in text[line - 1] or text[line - 1].startswith("def key"), line


CALLS = (
    ["by_sort", "key"],
    ["by_generator", "generate"],
    ["by_constructor", "Thing.__init__"],
    ["by_comparison", "Thing.__eq__"],
    ["by_reduce", "add"],
    ["recurse"] * 31,
    ["by_coroutine", "coroutine"],
)


def is_right_python(path):
    short = [it.rpartition(".")[2] for it in path]
    calls = [[it.rpartition(".")[2] for it in call] for call in CALLS]
    main = ["<module>", "main", "work"]
    thread = ["_bootstrap", "_bootstrap_inner", "run", "work"]
    for start in (main, thread):
        if short[: len(start)] == start:
            return short[len(start) : -1] in calls
    return False


FORKING = """
import os, time

def burn():
    end_s = time.monotonic() + 0.004
    while time.monotonic() < end_s:
        pass

def child():
    burn()

while True:
    pid = os.fork()
    if not pid:
        child()
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_children_that_are_gone_before_their_events_arrive_are_walked_by_what_their_parent_has(
    record,
):
    # What binds a function at its first call needs a register that is known in a leaf alone; each
    # child would do that again.
    bound = {**os.environ, "LD_BIND_NOW": "1"}
    program = subprocess.Popen([sys.executable, "-c", FORKING], env=bound)
    try:
        with record("-F", str(HZ), "-p", str(program.pid), "-d", "3") as recorder:
            recorder.process.wait(30)
    finally:
        program.kill()
        program.wait()
    tables = recorder.capture.tables
    frames = {row["frame_id"]: row for row in tables["frame"].to_pylist()}
    stacks = {row["stack_id"]: row for row in tables["stack"].to_pylist()}
    total = whole = named = 0
    for row in tables["sample"].to_pylist():
        if row["kind"] == "cpu" and row["pid"] != program.pid:
            stack = stacks.get(row["stack_id"], {"frame_ids": [], "complete": False})
            python = [it for it in map(frames.get, stack["frame_ids"]) if it["kind"] == "python"]
            total += row["weight_count"]
            whole += row["weight_count"] * stack["complete"]
            path = [it["function"] for it in reversed(python)]
            named += row["weight_count"] * (path == ["<module>", "child", "burn"])
    assert total > 300
    assert whole / total >= 0.98
    assert named / total >= 0.9


def test_stacks_of_a_static_program_of_musl_are_whole_for_the_kernel_too(record, tmp_path):
    """Where its threads begin has no unwind data: the walk ends there, and counts as whole."""
    compiler = shutil.which("musl-gcc") or pytest.skip("needs musl-gcc")
    program, source = tmp_path / "outermost", PROGRAMS / "outermost.c"
    subprocess.run([compiler, "-O2", "-static", "-o", program, source, "-pthread"], check=True)
    with record("--", str(program), "1") as recorder:
        recorder.process.wait(30)  # its tables are made
    with record("-F", str(HZ), "--", str(program), "3") as recorder:
        recorder.process.wait(30)
    rows = recorder.capture.tables["event"].to_pylist()
    ends = Counter({it["name"]: it["value"] for it in rows if it["kind"] == "stack_end"})
    walks = sum(n for name, n in ends.items() if not name.startswith("note."))
    assert walks > 300
    assert ends["whole.entry"] / walks >= 0.97, ends
