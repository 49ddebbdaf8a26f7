# SPDX-License-Identifier: Apache-2.0
"""The names that a Python program gives its threads, read out of the memory of its process."""

from __future__ import annotations

import ast
import contextlib
import gc
import io
import random
import shutil
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import cpython_heap
from sonde import _native, procfs
from sonde.agent import thread_names
from sonde.agent.thread_names import ThreadNames
from sonde.resolve import Resolver
from sonde.resolve.given_names import GivenNames, shown_name
from sonde.resolve.process_image import ProcessImage
from sonde.resolve.tracked_process import TrackedProcess
from sonde.unwind import PythonThreads, python_objects
from sonde.unwind.cpython import FoundInterpreter, Interpreter, UnsupportedPythonError, interpreter
from sonde.unwind.process_memory import ProcessMemory
from sonde.unwind.python_objects import UnreadableError
from sonde.unwind.python_threads import FAILURES, MAX_NAME

PROGRAMS = Path(__file__).parents[1] / "programs" / "python"
_NAMED = [shutil.which(f"python3.{minor}") for minor in range(10, 15)]
PYTHONS = sorted(
    {
        path.resolve()
        for path in map(
            Path,
            [
                sys.executable,
                *filter(None, _NAMED),
                *Path.home().glob(".pyenv/versions/3.1[0-4].*/bin/python3"),
            ],
        )
        if path.parent.name != "shims"
    }
)
SPARSE = """
import sys, threading
{more}
print("ready", flush=True)
sys.stdin.read()
"""


def loaded_in(pid: int) -> tuple[Interpreter, int] | None:
    """The interpreter of a process, and the address of its _PyRuntime."""
    starts: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "python" in line.split()[-1]:
            starts.setdefault(line.split()[-1], int(line.partition("-")[0], 16))
    for path, start in starts.items():
        if not Path(path).is_file() or (found := _native.find_cpython(path)) is None:
            continue
        version, runtime, key, evaluation, raw = found
        build = FoundInterpreter(version, runtime, key, tuple(evaluation), bytes(raw))
        with contextlib.suppress(UnsupportedPythonError):
            is_shared = Path(path).read_bytes()[16] == 3  # ET_DYN
            return interpreter(build, Path(path).name), runtime + start * is_shared
    return None


@contextlib.contextmanager
def running(python: Path | str, *arguments: str) -> Iterator[tuple[int, str]]:
    """(pid of a program, the first line that it prints)"""
    pipe = subprocess.PIPE
    command = [str(python), *arguments]
    program = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert program.stdout is not None
    try:
        yield program.pid, program.stdout.readline()
    finally:
        program.kill()
        program.communicate()


def threads_of(pid: int) -> PythonThreads:
    loaded = loaded_in(pid)
    if loaded is None:
        pytest.skip("this interpreter is not one that is walked")
    return PythonThreads(*loaded)


def process_of(pid: int) -> TrackedProcess:
    found = procfs.read_stat(pid)
    assert found is not None
    return TrackedProcess(pid, found.start_ns, found.ppid, found.comm, ProcessImage(pid, "proc"))


def shown(name: str) -> str:
    """A name as it is read: the kernel's names are cleaned in the same way."""
    return procfs.text(name.encode())[:MAX_NAME]


@pytest.mark.parametrize("python", PYTHONS, ids=lambda it: "-".join(it.parts[-3:]))
def test_every_thread_has_the_name_that_the_program_gave_it(python: Path) -> None:
    with running(python, str(PROGRAMS / "named_threads.py")) as (pid, printed):
        threads, memory = threads_of(pid), ProcessMemory(pid, 0)
        truth = {int(tid): shown(name) for tid, name in ast.literal_eval(printed).items()}
        assert len(truth) == 31
        assert threads.read(memory) == truth
        assert threads.read(memory) == truth  # where threading._active is known
        assert "a\\x00b\\x0a\\x1b[31m" in truth.values()


def test_a_program_without_threading_has_no_names() -> None:
    source = SPARSE.format(more="for name in list(sys.modules):\n    del sys.modules[name]")
    with running(sys.executable, "-c", source) as (pid, _):
        assert threads_of(pid).read(ProcessMemory(pid, 0)) == {}


@pytest.mark.parametrize(
    "more",
    [
        "threading._active.update((number, None) for number in range(100_000))",
        "sys.modules.update((str(number), sys) for number in range(100_000))",
        "threading._active = [threading.current_thread()]",
        "sys.modules['threading'] = 5",
    ],
)
def test_what_is_no_table_of_threads_is_refused(more: str) -> None:
    with running(sys.executable, "-c", SPARSE.format(more=more)) as (pid, _):
        threads = threads_of(pid)
        before_s = time.monotonic()
        with contextlib.suppress(UnreadableError):
            assert threads.read(ProcessMemory(pid, 0)) == {}
        assert time.monotonic() - before_s < 20 * python_objects.MAX_S


def test_a_name_that_is_no_text_is_left_out() -> None:
    more = (
        "thread = threading.Thread(target=threading.Event().wait, daemon=True); thread.start()\n"
        "threading.Thread(target=threading.Event().wait, name='good', daemon=True).start()\n"
        "thread._name = 5"
    )
    with running(sys.executable, "-c", SPARSE.format(more=more)) as (pid, _):
        names = threads_of(pid).read(ProcessMemory(pid, 0))
    assert sorted(names.values()) == ["MainThread", "good"]


class Hostile:
    """Memory in which everything may be read, and every word leads to more of it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.reads = self.bytes = 0

    def read_many(self, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        self.reads += len(parts)
        self.bytes += sum(size for size, _ in parts)
        return [self._content(size) for size, _ in parts]

    def _content(self, size: int) -> bytes:
        words = size // 8 + 1
        at = self._random.choice((0x1000, 1 << 46, 1 << 63, 0, 3))
        kind = self._random.randrange(5)
        if kind == 0:
            raw = struct.pack("<Q", at) * words
        elif kind == 1:
            raw = b"\xff" * 8 * words
        elif kind == 2:
            raw = self._random.randbytes(8 * words)
        elif kind == 3:  # of a dict with as many entries as are read, of types with all flags
            raw = struct.pack("<QBBBxIqq", 0x1000, 13, 14, 1, 0, 0, 16_000) * words
        else:
            raw = struct.pack("<4Q", 1, 0x1000, 16_000, 7 << 26) * words
        return raw[: size - self._random.randrange(2) * self._random.randrange(size + 1)]


class Made:
    """Memory with a heap that was made."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def read_many(self, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self._raw[at : at + size] for size, at in parts]


def of_minor(minor: int) -> Interpreter:
    published = b"xdebugpy" + struct.pack("<79Q", minor << 16 | 3 << 24, 0, *[8] * 77)
    build = FoundInterpreter(3 << 24 | minor << 16, 0x2000, 0x3000, (1, 2, 0, 0), published)
    return interpreter(build, "python3")


@pytest.mark.parametrize("minor", range(10, 15))
def test_a_made_heap_of_each_version_is_read(minor: int) -> None:
    raw = cpython_heap.heap(minor, ["loader", "caf\xe9", "x" * 300])
    names = PythonThreads(of_minor(minor), cpython_heap.RUNTIME).read(Made(raw))
    assert names == {101: "loader", 102: "caf\xe9", 103: "x" * MAX_NAME}


@pytest.mark.parametrize("minor", range(10, 15))
def test_memory_that_lies_costs_no_more_than_the_limits(minor: int) -> None:
    python = of_minor(minor)
    for seed in range(300):
        memory = Hostile(seed)
        with contextlib.suppress(*FAILURES):
            names = PythonThreads(python, 0x2000).read(memory)
            assert all(name.isprintable() and len(name) <= MAX_NAME for name in names.values())
        assert memory.reads <= 2 * python_objects.MAX_READS
        assert memory.bytes <= 2 * python_objects.MAX_BYTES


@pytest.mark.parametrize(
    ("kernel_name", "given", "expected"),
    [
        ("python3", "loader-1", "loader-1"),
        ("python3", "Thread-3 (run)", "Thread-3 (run)"),
        ("", "Thread-3", "Thread-3"),
        ("pt_autograd_0", "Dummy-4", "pt_autograd_0"),
        ("pt_autograd_0", "Thread-4 (run\n)", "pt_autograd_0"),
        ("pt_data_pin", "pin memory", "pin memory"),
        ("Thread-3 (work", "Thread-3 (worker)", "Thread-3 (worker)"),  # 3.14
    ],
)
def test_a_mere_default_does_not_hide_a_name_that_was_set(
    kernel_name: str, given: str, expected: str
) -> None:
    assert shown_name(kernel_name, given, "python3") == expected


def test_names_are_bounded_for_each_user_and_what_is_left_out_is_counted() -> None:
    given, processes = GivenNames(max_names=400), [process_of(1) for _ in range(8)]
    for process in processes:
        process._party = 1000
    names = dict.fromkeys(range(40), "x")
    left_out = [given.add(it, names, lambda: processes) for it in processes]
    assert left_out == [0, 0, 40, 40, 40, 40, 40, 40]
    assert given.add(processes[0], names, lambda: processes) == 0  # the same once more
    processes[1].on_exec(0)
    assert given.add(processes[2], names, lambda: processes) == 0
    processes[3]._party = 1001
    assert given.add(processes[3], names, lambda: processes) == 0


class Loaded:
    """In place of the agent's unwinding: a process whose Python is known."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._found = loaded_in(pid)

    def loaded_python_of(self, key: tuple[int, int]) -> tuple[Interpreter, int] | None:
        return self._found if key[0] == self._pid else None


class Counted(PythonThreads):
    """Counts its reads."""

    reads = 0

    def read(self, memory: python_objects.Parts) -> dict[int, str]:
        Counted.reads += 1
        return super().read(memory)


def test_a_process_is_read_when_it_has_a_new_thread_and_rarely_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread_names, "PythonThreads", Counted)
    Counted.reads = 0
    with running(sys.executable, str(PROGRAMS / "named_threads.py")) as (pid, printed):
        tids = sorted(map(int, ast.literal_eval(printed)))
        resolver = Resolver(has_budget=False)
        resolver.processes.scan()
        start_ns = resolver.processes.start_of(pid)
        process = resolver.processes.find(pid, start_ns)
        names = ThreadNames(resolver, Loaded(pid))  # type: ignore[arg-type]
        now_s = 1e6
        monkeypatch.setattr(thread_names.time, "monotonic", lambda: now_s)

        names.update([(pid, start_ns, pid)])  # a process with its first thread alone
        assert Counted.reads == 0
        names.update([(pid, start_ns, tid) for tid in tids[:10]])
        assert Counted.reads == 1
        assert resolver.processes.thread_name(process, tids[1]) == "loader-0"
        assert resolver.processes.thread_name(process, pid) == process.comm
        for _ in range(100):  # each a tick
            now_s += 1
            names.update([(pid, start_ns, tid) for tid in tids[:10]])
        assert 6 <= Counted.reads <= 12
        before = Counted.reads
        now_s += 1
        names.update([(pid, start_ns, tid) for tid in tids])
        assert Counted.reads == before + 1
        resolver.close()
    now_s += 100
    names.update([(pid, start_ns, tids[-1])])
    assert names.unread == 1
    assert resolver.processes.thread_name(process, tids[1]) == "loader-0"  # of its last rows


class Silent:
    """In place of what reads a process's names: it has none."""

    def __init__(self, *_: object) -> None:
        pass

    def read(self, memory: object) -> dict[int, str]:
        return {}


class Anything:
    """In place of processes, and of the agent's unwinding: all have a Python."""

    def __init__(self, resolver: Resolver) -> None:
        self.processes = self
        self.python_budget = resolver.python_budget

    def loaded_python_of(self, key: tuple[int, int]) -> tuple[object, int]:
        return object(), 1

    def find(self, pid: int, start_ns: int) -> TrackedProcess:
        process = TrackedProcess(pid, start_ns, 1, "python3", ProcessImage(pid, "exec"))
        process._party = 1 if pid < 100 else 2
        return process

    def give_thread_names(self, process: TrackedProcess, names: dict[int, str]) -> None:
        assert not names


@pytest.mark.parametrize("levels", [1, 2])
def test_threads_that_were_looked_up_take_a_bounded_part_of_memory(
    monkeypatch: pytest.MonkeyPatch, levels: int
) -> None:
    monkeypatch.setattr(thread_names, "PythonThreads", Silent)
    monkeypatch.setattr(thread_names, "MOST_BYTES", most := 2 << 20)
    monkeypatch.setattr(thread_names, "TIMES", 0.0)
    monkeypatch.setattr(thread_names, "UPDATE_S", 60.0)
    monkeypatch.setattr(thread_names, "ProcessMemory", lambda *_: io.BytesIO())
    inside = procfs.Credentials((1, 1), 1, levels)
    monkeypatch.setattr(procfs, "read_credentials", lambda _: inside)
    monkeypatch.setattr(procfs, "inner_tids", lambda _, tids: {tid: tid + 7 for tid in tids})
    anything = Anything(Resolver(has_budget=False))
    names = ThreadNames(anything, anything)  # type: ignore[arg-type]
    names.update([(5, 1, 50_000_000 + tid) for tid in range(20)])
    (honest,) = (it for it in names.memory._caches if it.party == 1)
    tracemalloc.start()
    try:
        for pid in range(1_000, 1_100):
            base = pid * 10_000
            names.update([(pid, 1, base + tid) for tid in range(4_000)])
            assert names.memory.bytes <= most
        gc.collect()
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used < 1.3 * most
    assert names.memory.emptied > 50
    assert len(honest.seen) == 20
