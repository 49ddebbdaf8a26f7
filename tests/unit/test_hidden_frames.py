# SPDX-License-Identifier: Apache-2.0
"""Reports without the kernel's frames, without the runtime's, or with Python's alone."""

from __future__ import annotations

import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from captures import Writer
from sonde.errors import CaptureTooLarge
from sonde.export import folded, html, json_report, pprof, speedscope, table
from sonde.export.pprof_profile_pb2 import Profile as PprofProfile
from sonde.model.code import HIDDEN, NO_STACK, Hide
from sonde.model.profile import ProfileKind
from sonde.query import queries
from sonde.query.capture import Capture, read
from sonde.query.device_callers import caller
from sonde.query.hidden_frames import RUNTIME
from sonde.query.session import Session

PAGE = Path(__file__).parents[2] / "web" / "src" / "flame.ts"

START = ("_start", "python3.11", "", 0, "user")
EVAL = ("_PyEval_EvalFrameDefault", "libpython3.11.so.1.0", "", 0, "user")
STEP = ("step", "[python]", "app/train.py", 12, "python")
PYTHON_FILE = ("main", "libc.py", "app/libc.py", 3, "python")
MATMUL = ("matmul", "libtorch_cpu.so", "", 0, "user")
COPY = ("memmove", "libc.so.6", "", 0, "user")
INLINED = ("copy", "libstdc++.so.6", "/usr/include/copy.h", 9, "inlined")
CLOCK = ("clock_gettime", "[vdso]", "", 0, "vdso")
JIT = ("compiled", "[jit]", "", 0, "jit")
READ = ("vfs_read", "[kernel]", "", 0, "kernel")
MODULE = ("ioctl", "[module]", "", 0, "kernel")
LIBRARY = ("run", "[memfd:sonde-library]", "", 0, "user")
ALL = (START, EVAL, STEP, PYTHON_FILE, MATMUL, INLINED, COPY, CLOCK, JIT, READ, MODULE)


@pytest.fixture
def capture(tmp_path: Path) -> Capture:
    """Stacks with frames of every kind, of the kernel alone, of Sonde's library, and none."""
    writer = Writer()
    train = writer.process(
        100, "python", threads=[{"tid": it, "comm": "python"} for it in (100, 101)]
    )
    kernel = writer.process(17, "kworker", ppid=2)
    program = (START, EVAL, STEP)
    writer.on_cpu(train, 100, writer.stack(*ALL), 100)
    writer.on_cpu(train, 100, writer.stack(*program, MATMUL, COPY), 40)
    writer.on_cpu(train, 100, writer.stack(*program, MATMUL, COPY, READ), 30)
    writer.on_cpu(train, 100, 0, 7)
    writer.on_cpu(kernel, 17, writer.stack(READ), 20)
    writer.on_cpu(kernel, 17, writer.stack(READ, MODULE), 5)
    writer.wait(train, 100, "futex", 4.0, count=9, stack=writer.stack(*program, COPY, READ))
    writer.wait(train, 101, "sleep", 3.0, count=9, stack=writer.stack(LIBRARY, COPY, READ))
    writer.wait(kernel, 17, "read", 2.0, count=9, stack=writer.stack(READ))
    return read(writer.write(tmp_path / "run.sonde"))


def stacks_of(session: Session, kind: ProfileKind = ProfileKind.ON_CPU) -> dict[Any, int]:
    """Events by the names of the frames of a stack, outermost first."""
    found: dict[Any, int] = {}
    for row in queries.profile(session, kind):
        names = tuple(frame.name for frame in session.stacks[row.stack][::-1])
        found[names] = found.get(names, 0) + row.events
    return found


@pytest.mark.parametrize(
    ("hide", "left"),
    [
        (Hide.KERNEL, ALL[:-2]),
        (Hide.RUNTIME, (STEP, PYTHON_FILE, MATMUL, JIT)),
        (Hide.NATIVE, (STEP, PYTHON_FILE)),
    ],
)
def test_what_is_left_of_a_stack(capture: Capture, hide: Hide, left: tuple[Any, ...]) -> None:
    assert stacks_of(Session(capture, hide))[tuple(name for name, *_ in left)] == 100


def test_stacks_that_become_equal_are_one(capture: Capture) -> None:
    session = Session(capture, Hide.RUNTIME)

    assert stacks_of(session) == {
        ("step", "main", "matmul", "compiled"): 100,
        ("step", "matmul"): 70,
        (HIDDEN.name,): 25,
        (NO_STACK.name,): 7,
    }
    assert len(queries.profile(session, ProfileKind.ON_CPU)) == 4


@pytest.mark.parametrize("hide", Hide)
@pytest.mark.parametrize("kind", [ProfileKind.ON_CPU, ProfileKind.OFF_CPU])
def test_sums_stay_equal(capture: Capture, hide: Hide, kind: ProfileKind) -> None:
    whole, hidden = Session(capture), Session(capture, hide)

    for column in ("row_events", "row_ns", "row_bytes"):
        sums = [sum(getattr(queries.profile(it, kind), column)) for it in (whole, hidden)]
        assert sums[0] == sums[1]
    uses = [queries.top_functions(it, kind) for it in (whole, hidden)]
    assert uses[0].self_ns_in_all == uses[1].self_ns_in_all


@pytest.mark.parametrize("hide", Hide)
def test_waits_of_sonde_are_known_without_their_frames(capture: Capture, hide: Hide) -> None:
    waits = {wait.reason: wait for wait in queries.waits(Session(capture, hide))}

    assert [reason for reason, wait in waits.items() if wait.of_sonde] == ["sleep"]
    assert waits["futex"].place == "step train.py:12"
    assert waits["read"].place == ""


def test_what_launched_work_is_hidden_where_no_frame_is_left(capture: Capture) -> None:
    session = Session(capture, Hide.NATIVE)
    launched = {caller(session.stacks, number) for number in range(1, len(session.stacks))}

    assert {frame.name for frame in launched if frame} == {"step", "main", HIDDEN.name}


def test_memory_that_it_needs_counts(capture: Capture) -> None:
    budget = capture.budget
    assert budget is not None
    held = budget.held_bytes
    Session(capture, Hide.KERNEL)
    assert budget.held_bytes == held

    budget.limit_bytes = held
    with pytest.raises(CaptureTooLarge, match="of memory to read"):
        Session(capture, Hide.KERNEL)


def test_without_a_stack_there_is_nothing_to_hide(tmp_path: Path) -> None:
    session = Session(read(Writer().write(tmp_path / "b.sonde")), Hide.NATIVE)

    assert len(session.stacks) == 1
    assert session.stacks[0] == (NO_STACK,)


def test_an_unknown_frame_is_not_the_kernels(tmp_path: Path) -> None:
    writer = Writer()
    key = writer.process(5, "lost")
    number = writer.stack("gone", READ)
    writer.rows["frame"] = [row for row in writer.rows["frame"] if row["function"] != "gone"]
    writer.on_cpu(key, 5, number, 3)
    capture = read(writer.write(tmp_path / "c.sonde"))

    assert stacks_of(Session(capture, Hide.KERNEL)) == {("[unknown]",): 3}
    assert stacks_of(Session(capture, Hide.NATIVE)) == {(HIDDEN.name,): 3}


def test_every_format_leaves_out_the_same_and_names_it(capture: Capture) -> None:
    session = Session(capture, Hide.RUNTIME)

    def written(exporter: Any) -> bytes:
        out = io.BytesIO()
        exporter.write(session, out, [ProfileKind.ON_CPU])
        return out.getvalue()

    lines = written(folded).decode().splitlines()
    assert sorted(lines) == [
        "kworker;[hidden] 25",
        "python;[no stack] 7",
        "python;step;main;matmul;compiled_[j] 100",
        "python;step;matmul 70",
    ]
    profile = PprofProfile.FromString(gzip.decompress(written(pprof)))
    names = {profile.string_table[it.name] for it in profile.function}
    expected = {"step", "main", "matmul", "compiled", "[hidden]", "[no stack]"}
    assert names == expected
    comments = [profile.string_table[it] for it in profile.comment]
    assert "stacks: without kernel and runtime" in comments
    scope = json.loads(written(speedscope))
    assert {it["name"] for it in scope["shared"]["frames"]} - expected == {
        "python (100)",
        "kworker (17)",
    }
    assert scope["name"] == "run.sonde, without kernel and runtime"
    document = json.loads(written(json_report))
    assert document["hide"] == "runtime"
    assert {it["function"] for it in document["functions"]["on-cpu"]} == expected
    assert "\nstacks: without kernel and runtime\n" in written(table).decode()
    page = html._document(session, [ProfileKind.ON_CPU], queries.EVERYTHING)
    assert page["hide"] == "without kernel and runtime"
    assert expected <= set(page["tree"]["name"])
    assert not {"memmove", "vfs_read", "_start"} & set(page["tree"]["name"])


def test_the_runtime_is_what_the_page_leaves_out() -> None:
    pattern = re.search(r"^const RUNTIME = /(.*)/;$", PAGE.read_text(), re.MULTILINE)

    assert pattern
    assert pattern[1] == RUNTIME.pattern
