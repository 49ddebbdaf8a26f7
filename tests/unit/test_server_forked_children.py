# SPDX-License-Identifier: Apache-2.0
"""Children are forks of one process: each alone with its question, and within its limits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from captures import scene
from sonde import interpreter
from sonde.server import children, forked_children
from sonde.server.children import Children
from sonde.server.forked_children import ForkedChildren

OPEN = "sonde.server.open_recording"
# Runs with children that do what a question's rows may make one do.
SERVER = """
import json, os, shutil, sys, tempfile, threading, time, weakref
from pathlib import Path
from sonde.server import fork_server
from sonde.server.children import keep_within

def limits():
    keep_within(*map(int, sys.argv[1:3]))

def look():
    limits()
    fds = sorted(int(one.name) for one in Path("/proc/self/fd").iterdir())
    asked = sys.stdin.buffer.read()
    found = {
        "pid": os.getpid(), "parent": os.getppid(), "asked": len(asked), "fds": len(fds),
        "tasks": len(os.listdir("/proc/self/task")), "before": os.environ.get("BEFORE"),
        "oom": int(Path("/proc/self/oom_score_adj").read_text()), "nice": os.nice(0),
    }
    os.environ["BEFORE"] = "1"
    print(json.dumps(found))

def burn():
    limits()
    while True:
        pass

def fill():
    limits()
    kept = [b"x" * (1 << 20) for _ in range(4_096)]

def crash():
    os.kill(os.getpid(), 11)

def stop():
    limits()
    raise OSError("as of a defect")

def write():
    limits()
    sys.stdout.buffer.write(b"x" * 5_000)

def spill():
    folder = tempfile.mkdtemp()
    weakref.finalize(limits, shutil.rmtree, folder)
    print(folder)

def nap():
    print(os.getpid(), flush=True)
    time.sleep(600)

fork_server.preload = lambda: None
every = (look, burn, fill, crash, stop, write, spill, nap)
fork_server.CHILDREN |= {one.__name__: one for one in every}
"""
LIMITS = [str(1 << 30), "20", str(1 << 20)]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the process that children are forked of runs."""
    file = tmp_path / "program.py"
    file.write_text(SERVER + "fork_server.main()\n")
    command = interpreter.command
    monkeypatch.setattr(interpreter, "command", lambda *_: command(file))
    return file


@pytest.fixture
def forked(program: Path) -> Iterator[ForkedChildren]:
    one = ForkedChildren()
    yield one
    one.close()


def look(forked: ForkedChildren, given: bytes = b"") -> dict[str, Any]:
    found = forked.output_of("look", LIMITS, 20, 1_000, given=given)
    assert found is not None
    content, late = found
    assert not late
    answer: dict[str, Any] = json.loads(content)
    return answer


def until(condition: Callable[[], object]) -> None:
    ends_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def nap(forked: ForkedChildren, process: int) -> tuple[threading.Thread, int]:
    """(who waits for a child that goes on, its pid)."""
    until(lambda: not children_of(process))
    napping = threading.Thread(target=forked.output_of, args=("nap", [], 60, 100))
    napping.start()
    until(lambda: children_of(process))
    (child,) = children_of(process)
    return napping, child


def test_each_question_has_a_child_to_itself(forked: ForkedChildren) -> None:
    first, second = look(forked, b"x" * 3_000_000), look(forked)
    assert (first["asked"], second["asked"]) == (3_000_000, 0)
    assert first["parent"] == second["parent"] != os.getpid()
    assert first["pid"] != second["pid"]
    assert first["tasks"] == 1
    assert second["before"] is None, "what a child changes is of it alone"
    # Of the program, its output for what comes last, and the folder that is listed.
    assert first["fds"] == second["fds"] == 5
    assert first["oom"] == 1_000
    assert first["nice"] == os.nice(0) + 5
    until(lambda: not children_of(first["parent"]))


@pytest.mark.parametrize(
    ("name", "limits", "seconds", "late"),
    [
        ("burn", [str(1 << 30), "1"], 20.0, False),
        ("burn", LIMITS, 0.3, True),
        ("fill", [str(400 << 20), "20"], 20.0, False),
        ("crash", LIMITS, 20.0, False),
        ("stop", LIMITS, 20.0, False),
        ("write", LIMITS, 20.0, False),
        ("none", LIMITS, 20.0, False),
    ],
)
def test_a_child_beyond_a_limit_ends_alone(
    forked: ForkedChildren, name: str, limits: list[str], seconds: float, late: bool
) -> None:
    before = look(forked)
    begun_s = time.monotonic()
    assert forked.output_of(name, limits, seconds, 4_999) == (b"", late)
    assert time.monotonic() - begun_s < 15
    assert look(forked)["parent"] == before["parent"]
    until(lambda: not children_of(before["parent"]))


def test_what_a_child_wrote_to_the_disk_is_removed(forked: ForkedChildren) -> None:
    found = forked.output_of("spill", LIMITS, 20, 1_000)
    assert found is not None
    folder = Path(found[0].decode().strip())
    assert folder.is_absolute()
    assert not folder.exists()


def test_an_answer_of_the_greatest_size_is_whole(forked: ForkedChildren) -> None:
    assert forked.output_of("write", LIMITS, 20, 5_000) == (b"x" * 5_000, False)


def test_where_the_process_was_killed_the_next_question_has_another(
    forked: ForkedChildren,
) -> None:
    before = look(forked)
    os.kill(before["parent"], signal.SIGKILL)
    until(lambda: not is_alive(before["parent"]))
    assert look(forked)["parent"] != before["parent"]


def test_a_fork_that_fails_does_not_end_other_children(
    program: Path, forked: ForkedChildren
) -> None:
    program.write_text(
        SERVER
        + "fork, forks = os.fork, []\n"
        + "def some():\n"
        + "    forks.append(1)\n"
        + "    if len(forks) == 3:\n"
        + "        raise BlockingIOError\n"
        + "    return fork()\n"
        + "os.fork = some\n"
        + "fork_server.main()\n"
    )
    process = look(forked)["parent"]
    napping, child = nap(forked, process)
    assert forked.output_of("look", LIMITS, 20, 1_000) is None, "another way is taken"
    assert look(forked)["parent"] == process
    assert is_alive(child)
    forked.close()
    napping.join(20)


def test_a_process_that_is_stuck_is_killed(
    forked: ForkedChildren, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_children, "STUCK_S", 0.0)
    before = look(forked)
    os.kill(before["parent"], signal.SIGSTOP)
    assert forked.output_of("look", LIMITS, 0.2, 1_000) == (b"", True)
    assert not is_alive(before["parent"])
    assert look(forked)["parent"] != before["parent"]


def test_without_a_question_it_ends(program: Path, forked: ForkedChildren) -> None:
    program.write_text(SERVER + "fork_server.IDLE_S = 0.3\nfork_server.main()\n")
    before = look(forked)["parent"]
    until(lambda: not Path(f"/proc/{before}").exists())
    assert look(forked)["parent"] != before


def test_a_server_that_is_killed_leaves_nothing(program: Path, tmp_path: Path) -> None:
    """Neither the process nor a child that still works."""
    asks = tmp_path / "asks.py"
    asks.write_text(
        "import sys, threading\n"
        "from sonde import interpreter\n"
        "from sonde.server.forked_children import ForkedChildren\n"
        "command = interpreter.command\n"
        f"interpreter.command = lambda *_: command({str(program)!r})\n"
        "ForkedChildren().output_of('nap', [], 100, 100)\n"
    )
    with subprocess.Popen([sys.executable, str(asks)]) as server:
        try:
            until(lambda: [*map(children_of, children_of(server.pid)), []][0])
            (process,) = children_of(server.pid)
            (child,) = children_of(process)
        finally:
            server.kill()
    until(lambda: not is_alive(process) and not is_alive(child))


def test_a_closed_server_leaves_nothing(forked: ForkedChildren) -> None:
    process = look(forked)["parent"]
    napping, child = nap(forked, process)
    assert look(forked)["fds"] == 5, "nothing of another child"
    forked.close()
    napping.join(20)
    assert not is_alive(process)
    until(lambda: not is_alive(child))


def test_where_none_can_be_forked_each_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit(1)\n")
    starts: list[str] = []
    command = interpreter.command

    def chosen(module: str, *arguments: str) -> tuple[str, ...]:
        starts.append(module)
        return command(module if module == OPEN else program, *arguments)

    monkeypatch.setattr(interpreter, "command", chosen)
    some = Children()
    capture = tmp_path / "capture"
    capture.write_bytes(scene().bytes())
    for _ in range(2):
        with capture.open("rb") as file:
            content, late = some.output_of(OPEN, LIMITS, 60, 1 << 20, stdin=file.fileno())
        assert (content[:1], late) == (b"+", False)
    # The reason why it cannot be preloaded is not found again with each question.
    assert starts == ["sonde.server.fork_server", OPEN, OPEN]
    some.close()


def test_where_memory_is_short_nothing_stays_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(children, "memory_bytes", lambda: children.LEAST_BYTES - 1)
    capture = tmp_path / "capture"
    capture.write_bytes(scene().bytes())
    some = Children()
    with capture.open("rb") as file:
        assert some.output_of(OPEN, LIMITS, 60, 1 << 20, stdin=file.fileno())[0][:1] == b"+"
    assert some._forked._process is None


def test_a_thread_of_an_import_is_refused() -> None:
    program = (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "from sonde.server import fork_server\n"
        "fork_server.preload()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert b"an import has started a thread" in done.stderr
