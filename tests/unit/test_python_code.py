# SPDX-License-Identifier: Apache-2.0
"""Names and lines of Python frames, read out of the memory of the process that has them."""

from __future__ import annotations

import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest

from sonde import _native, procfs
from sonde.agent.stacks import StackReader
from sonde.resolve import naming_budget
from sonde.resolve.naming_budget import NamingBudget
from sonde.resolve.process_image import ProcessImage
from sonde.resolve.tracked_process import TrackedProcess
from sonde.unwind import PythonCode, python_code
from sonde.unwind.cpython import (
    FoundInterpreter,
    Interpreter,
    UnsupportedPythonError,
    interpreter,
)
from sonde.unwind.python_code import INTERPRETED_FRAME, MAX_AHEAD

FUNCTIONS = 400
TAKES_OVER = """
import sys
def make(name):
    return compile(f"def {name}():\\n    return 1\\n", f"{name}.py", "exec").co_consts[0]
code = make("first")
at, others = id(code), []
print(at, flush=True)
sys.stdin.readline()
del code
while id(code := make("second")) != at:
    others.append(code)
print(at, flush=True)
sys.stdin.read()
"""
SOURCE = """
import sys
text = "def f():\\n" + "".join(f"    x{{i}} = {{i}}\\n" for i in range(100))
codes = [compile(text, f"made{{i}}.py", "exec").co_consts[0] for i in range({count})]
print(*(id(code) for code in codes), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def python() -> Interpreter:
    mapped = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split()[-1] for line in mapped if "/" in line and "x" in line.split()[1]}
    for path in sorted(paths, key=lambda it: "python" not in it):
        if (found := _native.find_cpython(path)) is not None:
            version, runtime, key, evaluation, raw = found
            build = FoundInterpreter(version, runtime, key, tuple(evaluation), bytes(raw))
            return interpreter(build, Path(path).name)
    pytest.skip("this interpreter is not one that is walked")


@pytest.fixture
def made():
    """A process with many code objects of a hundred lines, and their addresses."""
    source = SOURCE.format(count=FUNCTIONS)
    pipe = subprocess.PIPE
    program = subprocess.Popen([sys.executable, "-c", source], stdin=pipe, stdout=pipe, text=True)
    assert program.stdout is not None
    addresses = [int(word) for word in program.stdout.readline().split()]
    yield program, addresses
    program.kill()
    program.communicate()


def process_of(pid: int) -> TrackedProcess:
    found = procfs.read_stat(pid)
    assert found is not None
    return TrackedProcess(pid, found.start_ns, found.ppid, found.comm, ProcessImage(pid, "proc"))


def line_of(
    code: PythonCode, process: TrackedProcess, python: Interpreter, at: int, nth: int
) -> int:
    """The line that the frame of a function made above shows for one of its instructions."""
    place = python.code.instructions + 2 * nth if python.code.instructions else nth
    places = _native.FrameCache()
    known = code.frame([(process, python)], INTERPRETED_FRAME | at, 1 << 32 | place, places)
    assert known.frame.function == "f"
    return known.frame.line


def test_the_name_of_a_file_decides_its_version_only_where_the_file_has_none():
    of_3_12 = FoundInterpreter(0x030C01F0, 1, 2, (3, 4, 0, 0), b"")
    unnamed = FoundInterpreter(0, 1, 2, (3, 4, 0, 0), b"")

    for name in ("python3.12", "python3.12t", "python3.9", "worker", ""):
        assert interpreter(of_3_12, name).version == (3, 12)
    assert interpreter(unnamed, "libpython3.10.so.1.0").version == (3, 10)
    for name in ("worker", "python3.15", f"python3.{10**300}"):
        with pytest.raises(UnsupportedPythonError):
            interpreter(unnamed, name)


def test_line_tables_that_made_room_are_read_again(python, made):
    program, addresses = made
    bound = 64 << 10
    code, process = PythonCode(max_line_table_bytes=bound), process_of(program.pid)
    first = [line_of(code, process, python, at, 40) for at in addresses]
    assert len(set(first)) == 1
    assert 10 < first[0] < 40
    assert 0 < code.line_table_bytes <= bound
    later = [line_of(code, process, python, at, 80) for at in addresses]
    assert set(later) == {line_of(code, process, python, addresses[-1], 80)}
    assert later[0] > first[0]
    assert code.line_table_bytes <= bound
    assert code.lineless == 0


def test_a_line_table_that_is_gone_when_it_is_asked_for_again_is_counted(python, made):
    program, addresses = made
    code, process = PythonCode(max_line_table_bytes=64 << 10), process_of(program.pid)
    for at in addresses:
        line_of(code, process, python, at, 40)
    program.kill()
    program.wait()
    assert line_of(code, process, python, addresses[0], 80) == 0
    assert code.lineless == 1
    assert line_of(code, process, python, addresses[-1], 80) > 40
    assert code.lineless == 1


def test_names_of_python_code_cost_its_user_time(python, made, monkeypatch):
    """Of a long function each line takes long to find, and a program may have any number."""
    program, addresses = made
    process = process_of(program.pid)
    monkeypatch.setattr(TrackedProcess, "party", 1000)
    budget = NamingBudget(True, naming_budget.PYTHON_BURST_S, naming_budget.PYTHON_SHARE)
    found = []

    def slow(*_):
        found.append(1)
        until_s = time.thread_time() + 0.002
        while time.thread_time() < until_s:
            pass
        return 7

    monkeypatch.setattr("sonde.unwind.python_code.line_at", slow)
    monkeypatch.setattr(naming_budget, "TURN_S", 0.01)
    resolver = SimpleNamespace(budget=NamingBudget(), python_budget=budget)
    stacks = StackReader(resolver, SimpleNamespace())
    owners, words = [(process, python)], [INTERPRETED_FRAME | at for at in addresses[:100]]
    where = INTERPRETED_FRAME | 1 << 32 | python.code.instructions

    def lines():
        cache = stacks.python.frame_cache(owners, words, lambda: budget.is_over(1000))
        found = [
            cache.get(word, where) or stacks._interpreted(process, owners, None, word, where, cache)
            for word in words
        ]
        return [known.frame.line for known in found]

    first = lines()
    assert 1 <= first.count(7) == len(found) <= 6
    assert first.count(0) == 100 - len(found)
    assert resolver.budget.left_out[1000] == 100 - len(found)
    before = len(found)
    again = lines()
    assert (again.count(7), len(found)) == (first.count(7), before)  # and nothing is read meanwhile
    for _ in range(40):
        budget.tick()
        now = lines()
    assert now == [7] * 100


def test_another_process_with_the_pid_is_not_read(python, made):
    program, addresses = made
    code, process = PythonCode(), process_of(program.pid)
    before = TrackedProcess(
        program.pid,
        process.start_ns - 1_000_000_000,
        process.ppid,
        "",
        ProcessImage(program.pid, ""),
    )
    place = 1 << 32 | python.code.instructions
    for _ in range(2):
        found = code.frame(
            [(before, python)], INTERPRETED_FRAME | addresses[0], place, _native.FrameCache()
        )
        assert found.frame.function == ""
    assert code.unread == 2
    assert line_of(code, process, python, addresses[0], 40) > 10
    code.close()


def test_a_process_is_read_on_when_it_runs_another_program(python, monkeypatch):
    monkeypatch.setattr("sonde.unwind.python_code.TRUST_NS", 0)
    source = SOURCE.format(count=2).replace("sys.stdin.read()", "sys.stdin.readline()")
    again = f"import os; os.execv(sys.executable, [sys.executable, '-c', {source!r}])"
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", f"{source}\n{again}"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        code = PythonCode()
        for _ in range(2):
            at = int(program.stdout.readline().split()[0])
            assert line_of(code, process_of(program.pid), python, at, 40) > 10
            program.stdin.write("go on\n")
            program.stdin.flush()
        code.close()


def test_another_code_object_in_the_same_place_has_another_name(python, monkeypatch):
    monkeypatch.setattr("sonde.unwind.python_code.TRUST_NS", 0)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", TAKES_OVER], stdin=pipe, stdout=pipe, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        word = INTERPRETED_FRAME | int(program.stdout.readline())
        code, owners = PythonCode(), [(process_of(program.pid), python)]
        where = INTERPRETED_FRAME | 1 << 32 | python.code.instructions
        places = code.frame_cache(owners, [word])
        assert code.frame(owners, word, where, places).frame.function == "first"
        places = code.frame_cache(owners, [word])
        known = places.get(word, where)
        assert known is not None
        assert known.frame.function == "first"
        program.stdin.write("go on\n")
        program.stdin.flush()
        assert int(program.stdout.readline()) | INTERPRETED_FRAME == word
        places = code.frame_cache(owners, [word])
        assert places.get(word, where) is None
        assert code.frame(owners, word, where, places).frame.function == "second"
        program.kill()


@pytest.fixture
def requests(monkeypatch):
    """What is asked of the broker's child, by kind, as it is asked."""
    asked: list[str] = []
    send = procfs.BROKER._send

    def note(request, fd=None):
        asked.append(request[0])
        send(request, fd)

    monkeypatch.setattr(procfs.BROKER, "_send", note)
    return asked


def test_code_objects_are_read_together(python, made, requests):
    program, addresses = made
    owners = [(process_of(program.pid), python)]
    some = addresses[:MAX_AHEAD]
    alone, together = PythonCode(), PythonCode()
    expected = [line_of(alone, owners[0][0], python, at, 40) for at in some]
    requests.clear()

    together.read_ahead(owners, [INTERPRETED_FRAME | at for at in some])

    assert requests.count("many") == 3
    assert "at" not in requests
    assert len(requests) <= 8  # with opening the memory, and one for the working directory
    requests.clear()
    assert [line_of(together, owners[0][0], python, at, 40) for at in some] == expected
    assert requests == []


def test_code_objects_are_checked_together(python, made, requests):
    program, addresses = made
    owners = [(process_of(program.pid), python)]
    words = [INTERPRETED_FRAME | at for at in addresses[:MAX_AHEAD]]
    code = PythonCode()
    code.read_ahead(owners, words)
    code.trust_ns = 0
    requests.clear()

    code.read_ahead(owners, words)

    assert requests == ["many"]  # nothing has changed


def test_what_cannot_be_read_with_others_is_left_out_alone(python, made):
    program, addresses = made
    process = process_of(program.pid)
    code = PythonCode()
    nowhere = 1 << 46

    code.read_ahead([(process, python)], [INTERPRETED_FRAME | it for it in (*addresses, nowhere)])

    assert line_of(code, process, python, addresses[0], 40) > 10
    place = 1 << 32 | python.code.instructions
    cache = _native.FrameCache()
    found = code.frame([(process, python)], INTERPRETED_FRAME | nowhere, place, cache)
    assert found.frame.function == ""


def test_code_objects_that_were_replaced_are_noticed_together(python, monkeypatch):
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", TAKES_OVER], stdin=pipe, stdout=pipe, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        word = INTERPRETED_FRAME | int(program.stdout.readline())
        code, owners = PythonCode(), [(process_of(program.pid), python)]
        code.trust_ns = 0
        where = INTERPRETED_FRAME | 1 << 32 | python.code.instructions
        code.read_ahead(owners, [word, INTERPRETED_FRAME | 1 << 46])
        assert code.frame(owners, word, where, _native.FrameCache()).frame.function == "first"
        program.stdin.write("go on\n")
        program.stdin.flush()
        program.stdout.readline()
        code.read_ahead(owners, [word, INTERPRETED_FRAME | 1 << 46])
        code.trust_ns = 1 << 60  # what `frame` finds is what was read ahead
        assert code.frame(owners, word, where, _native.FrameCache()).frame.function == "second"
        program.kill()


def test_line_tables_keep_no_code_object_alive():
    """An empty one takes 33 bytes; the code object that it is of took 1 kB beside it, uncounted."""
    tables = python_code._LineTables(1 << 20)
    for _ in range(3):
        code = python_code._CodeObject(b"", "f", "x.py", "", 1, None, 0)
        kept = weakref.ref(code)
        tables.add(code, b"")
        del code
        assert kept() is None
    code = python_code._CodeObject(b"", "f", "x.py", "", 1, None, 0)
    tables.add(code, b"lines")
    assert code.lines == b"lines"
    assert tables.bytes == sys.getsizeof(b"lines")
    for _ in range(1 << 15):
        tables.add(python_code._CodeObject(b"", "f", "x.py", "", 1, None, 0), b"")
    assert code.lines is None
