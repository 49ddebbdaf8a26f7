# SPDX-License-Identifier: Apache-2.0
"""Reports show the innermost frame of the user's own code: 'step train.py:12'."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from captures import Writer
from sonde.cli.dump import text
from sonde.export import summary, table
from sonde.model.code import Frame
from sonde.model.profile import ProfileKind
from sonde.model.thread_stack import ThreadStack
from sonde.model.user_code import innermost_user_frame
from sonde.query import queries
from sonde.query.capture import read
from sonde.query.session import Session

START = ("_start", "python3.11", "", 0, "user", "system")
MODULE = ("<module>", "[python]", "app/train.py", 30, "python", "program")
STEP = ("Trainer.step", "[python]", "app/train.py", 12, "python", "program")
FETCH = ("fetch", "[python]", "app/feed.py", 7, "python", "program")
PACKAGE = ("dumps", "[python]", "simplejson/encoder.py", 99, "python", "package")
QUEUE = ("Queue.get", "[python]", "queue.py", 171, "python", "interpreter")
EVAL = ("_PyEval_EvalFrameDefault", "libpython3.11.so.1.0", "", 0, "user", "system")
SORT = ("qsort_r", "libc.so.6", "", 0, "user", "system")
LIBRARY = ("run", "[memfd:sonde-library]", "", 0, "user", "")


def frame(function: str, binary: str, file: str, line: int, kind: str, origin: str) -> Frame:
    return Frame(kind, function, binary, "", 0, file, line, origin)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """Two modules of a program, a package, the standard library, and machine code."""
    writer = Writer()
    train = writer.process(
        100, "python", threads=[{"tid": it, "comm": "python"} for it in (100, 101)]
    )
    native = writer.process(200, "gzip")
    program = [START, EVAL, MODULE, STEP]
    writer.on_cpu(train, 100, writer.stack(*program), 100)
    writer.on_cpu(train, 100, writer.stack(*program, FETCH, PACKAGE, SORT), 300)
    writer.on_cpu(train, 100, writer.stack(*program, SORT), 50)
    writer.on_cpu(native, 200, writer.stack("main", "deflate"), 20)
    writer.wait(train, 100, "futex", 4.0, count=9, stack=writer.stack(*program, FETCH, QUEUE, SORT))
    writer.wait(train, 101, "sleep", 3.0, count=9, stack=writer.stack(LIBRARY, SORT))
    writer.wait(native, 200, "read", 2.0, count=9, stack=writer.stack("main", "fill"))
    return Session(read(writer.write(tmp_path / "run.sonde")))


def test_a_function_has_the_line_of_the_users_code_that_called_it(session: Session) -> None:
    functions = queries.top_functions(session, ProfileKind.ON_CPU)
    location = {use.function: use.location for use in functions}

    assert location["qsort_r"] == "fetch feed.py:7"
    assert location["Trainer.step"] == "Trainer.step train.py:12"
    assert location["dumps"] == "dumps encoder.py:99"
    assert location["deflate"] == ""


def test_a_wait_is_shown_in_the_users_code(session: Session) -> None:
    waits = {wait.reason: wait for wait in queries.waits(session)}

    assert waits["futex"].place == "fetch feed.py:7"
    assert waits["read"].place == "fill [app]"
    assert waits["sleep"].of_sonde
    assert not waits["futex"].of_sonde


def test_tables_show_it_and_no_thread_of_sonde(session: Session) -> None:
    out = io.BytesIO()
    table.write(session, out)
    rows = out.getvalue().decode()

    assert "fetch feed.py:7                   qsort_r [libc.so.6]" in rows
    assert "[python]" not in rows
    assert "python (101)" not in rows
    shown = summary.render(session)
    assert "qsort_r               fetch feed.py:7" in shown
    assert "Trainer.step          train.py:12" in shown
    assert "threads not shown: 1 of Sonde" in shown


def test_of_a_program_that_is_a_package_the_package_is_shown() -> None:
    frames = [frame(*it) for it in (SORT, QUEUE, PACKAGE, START)]

    assert innermost_user_frame(frames) == frames[2]
    assert innermost_user_frame([frames[0], frames[1]]) == frames[1]
    assert innermost_user_frame([frames[0]]) is None


def test_a_package_of_the_program_has_its_folder() -> None:
    assert Frame("python", "load", "[python]", "", 0, "app/feed/__init__.py", 3).location == (
        "load feed/__init__.py:3"
    )


def test_a_dump_begins_with_it() -> None:
    frames = tuple(frame(*it) for it in (SORT, FETCH, START))
    shown = text(7, "python", [ThreadStack(7, "python", "S", frames, True, "")], set())

    assert "thread 7 (python), sleeping, in fetch feed.py:7" in shown
