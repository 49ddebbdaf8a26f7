# SPDX-License-Identifier: Apache-2.0
"""What becomes of a thread that is borrowed, at known points of the load: the tracer dies there, or
is late, or another thread holds what the load waits for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bench import storms

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or os.uname().machine != "x86_64", reason="needs root on x86-64"
)
PATIENCE_S = 20.0
FUTEX, NANOSLEEP, RECVFROM = 202, 35, 45
ALL_BUT_SETXID = (1 << 64) - 1 & ~(1 << 8 | 1 << 18 | 1 << 32)
"""A signal mask: the kernel lets nobody block SIGKILL (9) and SIGSTOP (19); 33 is SIGSETXID."""


@pytest.fixture(scope="module")
def bin_(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("borrowed")
    library = ["-shared", "-fPIC", "-lpthread"]
    for name, source, flags in (
        ("borrowed", "borrowed.c", ["-mavx2", "-mno-red-zone", "-pthread", "-rdynamic", "-ldl"]),
        ("payload.so", "payload.c", ["-Wl,-z,nodelete", *library]),
        ("holding.so", "holding.c", library),
        ("other.so", "payload.c", library),
    ):
        command = ["cc", "-O2", "-Wall", "-Wextra", "-o", folder / name, storms.PROGRAMS / source]
        subprocess.run([*command, *flags], check=True)
    return folder


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Until it holds."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, f"waited in vain for {what}"
        time.sleep(0.002)


class Conversation:
    """A process that reads lines and prints lines."""

    def __init__(self, *command: str | Path) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._left = b""

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    def _has_line(self) -> bool:
        assert self.process.stdout is not None
        self._left += self.process.stdout.read(4096) or b""
        return b"\n" in self._left

    def read_line(self) -> str:
        """The next line."""
        wait_for(self._has_line, f"a line from {self.process.args!r}")
        line, _, self._left = self._left.partition(b"\n")
        return line.decode()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class Borrowed(Conversation):
    """The program (tests/programs/attach/borrowed.c) and its thread."""

    def __init__(self, bin_: Path, mode: str) -> None:
        super().__init__(bin_ / "borrowed", mode)
        _, tid, *addresses = self.read_line().split()
        self.pid = self.process.pid
        self.tid = int(tid)
        self.at = dict(zip(("hook", "mark", "slow_lock"), map(int, addresses), strict=True))

    def call_of(self, tid: int) -> str:
        """The number of the call that a thread sleeps in, or "running"."""
        return Path(f"/proc/{self.pid}/task/{tid}/syscall").read_text().split()[0]

    def wait_until_both_are_stuck(self) -> None:
        """The thread and one that loads a library, in futexes."""
        others = {int(path.name) for path in Path(f"/proc/{self.pid}/task").iterdir()}
        others -= {self.pid, self.tid}
        both = [self.tid, min(others)]
        wait_for(lambda: all(self.call_of(it) == str(FUTEX) for it in both), "a ring of locks")

    def stops(self) -> int:
        """Rises by two whenever the thread is stopped in its sleep."""
        status = Path(f"/proc/{self.pid}/task/{self.tid}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    def wait_until_looked_at(self) -> None:
        """By the tracer or its guardian, some times more."""
        before = self.stops()
        wait_for(lambda: self.stops() >= before + 6, "a look at the thread")

    def end(self) -> str:
        """Closes its standard input. Returns the last line that it prints."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        line = self.read_line()
        assert self.process.wait(PATIENCE_S) == 0
        return line


TRACER = """
import json, os, sys
from pathlib import Path
from sonde import _native
from sonde.attach import glibc, threads
from sonde.attach.image import ProcessMemory

pid, tid, other, library = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
auxv = Path(f"/proc/{pid}/auxv").read_bytes()
with ProcessMemory(pid) as memory:
    found = glibc.landmarks(memory, glibc.mappings_of(pid))
names = [it for it in dir(found) if not it.startswith("_")]
landmarks = _native.Landmarks(**{it: getattr(found, it) for it in names} | other)

def children():
    # The guardian; others read files of the process.
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [it for it in found if it not in others]

def seen(call):
    # Where the thread sleeps now, also in a call that no thread is borrowed out of.
    threads.SAFE_CALLS[call] = "any"
    threads._FLAGS_OF.clear()
    while True:
        for it in threads.sleepers(pid, glibc.mappings_of(pid)):
            if it.tid == tid and it.call == call:
                return it

def load(call, bound_s, seed=[1]):
    seed[0] += 1
    it = seen(call)
    done = borrower.load(
        it.tid, Path(library).read_bytes(), f"borrowed-{seed[0]}", inner_tid=it.inner_tid,
        call=it.call, sp=it.sp, stack=it.stack, is_main=False, filters=0, path_seed=seed[0],
        bound_s=bound_s,
    )
    return done.outcome, done.why, done.stage, done.stopped

others = []
others = children()
borrower = _native.ThreadBorrower(pid, landmarks, auxv)
print("guardian", *children(), flush=True)
for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
"""
"""Does to a thread what it reads, by landmarks of which some are the program's own."""


class Tracer(Conversation):
    """The attaching process, and the guardian that outlives it."""

    def __init__(self, it: Borrowed, other: dict[str, int], library: Path) -> None:
        words = (str(it.pid), str(it.tid), json.dumps(other))
        super().__init__(sys.executable, "-c", TRACER, *words, library)
        _, guardian = self.read_line().split()
        self.guardian = int(guardian)
        self._held = os.pidfd_open(self.guardian)

    def ask(self, expression: str) -> Any:
        """What it answers to that."""
        self.send(expression)
        return json.loads(self.read_line())

    def signal_guardian(self, number: int) -> None:
        signal.pidfd_send_signal(self._held, number)

    def guardian_is_gone(self) -> bool:
        """Or a zombie, which somebody else has to bury."""
        try:
            stat = Path(f"/proc/{self.guardian}/stat").read_text()
        except FileNotFoundError:
            return True
        return stat.rpartition(")")[2].split()[0] == "Z"

    def kill(self) -> None:
        super().kill()
        if self._held >= 0:
            with contextlib.suppress(ProcessLookupError):
                self.signal_guardian(signal.SIGKILL)
            os.close(self._held)
            self._held = -1


@pytest.fixture
def begin(bin_: Path) -> Iterator[Callable[..., tuple[Borrowed, Tracer]]]:
    """A program in a mode, and the tracer of its thread."""
    started: list[Conversation] = []

    def both(mode: str = "recv", **other: str) -> tuple[Borrowed, Tracer]:
        it = Borrowed(bin_, mode)
        started.append(it)
        named = {name: it.at[function] for name, function in (other or HOOK).items()}
        tracer = Tracer(it, named, bin_ / "payload.so")
        started.append(tracer)
        return it, tracer

    yield both
    for one in reversed(started):
        one.kill()


Begin = Callable[..., tuple[Borrowed, Tracer]]
HOOK = {"dlopen": "hook"}


def run_first(tid: int, priority: int) -> None:
    """Before all that have none; in order of it among those that have one."""
    try:
        os.sched_setscheduler(tid, os.SCHED_FIFO, os.sched_param(priority))
    except PermissionError:
        pytest.skip("may not decide who runs first")


def on_one_cpu(it: Borrowed, tracer: Tracer) -> None:
    """The thread runs only where the tracer waits: it is always late for one that waits no time."""
    cpu = min(os.sched_getaffinity(0))
    for tid, priority in ((it.tid, 1), (tracer.process.pid, 2)):
        os.sched_setaffinity(tid, {cpu})
        run_first(tid, priority)


def die(tracer: Tracer) -> None:
    """At once; the guardian lives."""
    tracer.process.kill()
    tracer.process.wait()


def inside(it: Borrowed, tracer: Tracer, bound_s: float = 60, call: int = RECVFROM) -> int:
    """Begin a load, until the thread is where dlopen would begin; its signal mask there."""
    tracer.send(f"load({call}, {bound_s})")
    word, mask = it.read_line().split()
    assert word == "inside"
    return int(mask, 16)


def end_wait(it: Borrowed) -> str:
    """End the thread's own wait."""
    it.send("s")
    return it.read_line()


WHOLE = "answered 1 spoilt 0"
"""Its call brought one byte; registers, red zone, mask and alternate stack are what they were."""


# ---- the tracer lives ----


def test_a_thread_is_borrowed_and_put_back(begin: Begin) -> None:
    it, tracer = begin()
    mask = inside(it, tracer)
    it.send("d")

    assert json.loads(tracer.read_line()) == ["done", "", "put back", True]
    assert mask == ALL_BUT_SETXID
    assert end_wait(it) == WHOLE


def test_a_load_that_waits_in_a_ring_of_locks_is_given_up(begin: Begin, bin_: Path) -> None:
    it, tracer = begin()
    it.send(f"a {bin_ / 'holding.so'}")
    assert it.read_line() == "constructor"
    inside(it, tracer)
    it.send("l")  # it has the loader's lock, and wants the one of open files
    it.send("d")  # which this one has, and wants the loader's

    assert json.loads(tracer.read_line())[:2] == ["busy", "the loader was busy"]
    assert it.read_line() == "loaded"
    assert end_wait(it) == WHOLE


def test_a_load_that_waits_for_something_else_is_left_alone(begin: Begin) -> None:
    it, tracer = begin()
    inside(it, tracer)
    it.wait_until_looked_at()
    it.send("f")
    wait_for(lambda: it.call_of(it.tid) == str(FUTEX), "a futex")
    it.wait_until_looked_at()
    it.send("w")
    assert it.read_line() == "woken"
    it.send("d")

    assert json.loads(tracer.read_line())[0] == "done"
    assert end_wait(it) == WHOLE


def test_a_thread_that_does_not_come_in_time_is_put_back_before_the_load(begin: Begin) -> None:
    it, tracer = begin()
    on_one_cpu(it, tracer)
    for _ in range(5):
        assert tracer.ask(f"load({RECVFROM}, 0)") == ["busy", "it took too long", "start", True]
    mask = inside(it, tracer)
    it.send("d")

    assert json.loads(tracer.read_line())[0] == "done", "nothing of the attempts before is left"
    assert mask == ALL_BUT_SETXID
    assert end_wait(it) == WHOLE


def test_a_thread_that_took_the_fork_guard_late_gives_it_back(begin: Begin, bin_: Path) -> None:
    it, tracer = begin(list_lock="slow_lock")
    on_one_cpu(it, tracer)
    tracer.send(f"load({RECVFROM}, 0.3)")
    assert it.read_line() == "locks"
    time.sleep(0.5)  # more than the load may take
    it.send("g")

    assert json.loads(tracer.read_line())[0] in ("done", "let-go")
    assert end_wait(it) == WHOLE
    it.send(f"a {bin_ / 'holding.so'}")
    assert it.read_line() == "constructor"
    it.send("l")
    assert it.read_line() == "loaded", "the lock of open files is free"


SPINS = """
import time
print("here", flush=True)
input()
until = time.monotonic() + 0.4
while time.monotonic() < until:
    pass
"""


def test_a_thread_that_stops_late_is_let_go_and_borrowed_again(begin: Begin) -> None:
    """Its CPU is somebody else's, for longer than its stop is waited for."""
    it, tracer = begin(dlopen="mark")
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("one CPU")
    os.sched_setaffinity(it.tid, {cpus[0]})
    os.sched_setaffinity(tracer.process.pid, {cpus[1]})
    run_first(tracer.process.pid, 1)
    spins = Conversation(sys.executable, "-c", SPINS)
    try:
        assert spins.read_line() == "here"
        os.sched_setaffinity(spins.process.pid, {cpus[0]})
        run_first(spins.process.pid, 1)
        spins.send("")
        late = tracer.ask(f"load({RECVFROM}, 60)")
        assert spins.process.wait(PATIENCE_S) == 0
    finally:
        spins.kill()

    assert late == ["passed-over", "it did not stop", "borrow", True]
    wait_for(lambda: tracer.ask(f"load({RECVFROM}, 60)")[0] == "done", "a load")
    assert end_wait(it) == WHOLE


def test_a_thread_whose_call_would_answer_a_part_is_not_borrowed(begin: Begin) -> None:
    _, tracer = begin("partial")

    assert tracer.ask(f"load({RECVFROM}, 60)") == ["passed-over", "it moved on", "borrow", True]


def test_a_thread_is_borrowed_only_in_the_call_that_it_was_seen_in(begin: Begin) -> None:
    """Here it is often in a futex by the time that it stops."""
    it, tracer = begin("flip", dlopen="mark")
    outcomes = tracer.ask(f"[load({NANOSLEEP}, 60)[0] for _ in range(150)]")
    _, marked, *_, in_futex = it.end().split()

    assert set(outcomes) <= {"done", "passed-over"}
    assert int(marked) == outcomes.count("done")
    assert int(in_futex) == 0


def test_the_guardian_ends_when_it_is_no_longer_needed(begin: Begin) -> None:
    _, tracer = begin()
    assert tracer.ask("borrower.close()") is None
    assert tracer.ask("children()") == []
    assert tracer.ask("globals().pop('borrower') and 7") == 7, "closed once, also where it ends"
    assert tracer.process.poll() is None


def test_the_guardian_ends_with_what_it_was_made_for(begin: Begin) -> None:
    _, tracer = begin()
    assert tracer.ask("globals().pop('borrower') and 7") == 7
    assert tracer.ask("children()") == []


# ---- the tracer is killed: the frame and the guardian alone see the thread home ----


def test_the_frame_alone_restores_a_thread_in_recv(begin: Begin) -> None:
    it, tracer = begin()
    inside(it, tracer)
    tracer.signal_guardian(signal.SIGKILL)
    die(tracer)
    it.send("d")

    assert end_wait(it) == WHOLE


def test_the_frame_alone_ends_a_poll_as_a_handled_signal_would(begin: Begin) -> None:
    it, tracer = begin("poll")
    inside(it, tracer, call=7)
    tracer.signal_guardian(signal.SIGKILL)
    die(tracer)
    it.send("d")

    assert it.read_line() == "answered -4 spoilt 0"


def test_the_guardian_breaks_a_ring_of_locks(begin: Begin, bin_: Path) -> None:
    it, tracer = begin()
    it.send(f"a {bin_ / 'holding.so'}")
    assert it.read_line() == "constructor"
    inside(it, tracer)
    tracer.signal_guardian(signal.SIGSTOP)
    die(tracer)
    it.send("l")
    it.send("d")
    it.wait_until_both_are_stuck()
    tracer.signal_guardian(signal.SIGCONT)

    assert it.read_line() == "loaded"
    assert end_wait(it) == WHOLE
    wait_for(tracer.guardian_is_gone, "the guardian's end")


def test_the_guardian_leaves_alone_what_waits_for_something_else(begin: Begin) -> None:
    it, tracer = begin()
    inside(it, tracer)
    it.send("f")
    wait_for(lambda: it.call_of(it.tid) == str(FUTEX), "a futex")
    die(tracer)
    it.wait_until_looked_at()
    it.send("w")
    assert it.read_line() == "woken"
    it.send("d")

    assert end_wait(it) == WHOLE
    wait_for(tracer.guardian_is_gone, "the guardian's end")


@pytest.mark.parametrize("how", ["tracer_dies", "tracer_ends"])
def test_a_thread_that_was_let_go_is_seen_home_too(begin: Begin, bin_: Path, how: str) -> None:
    it, tracer = begin()
    it.send(f"a {bin_ / 'holding.so'}")
    assert it.read_line() == "constructor"
    inside(it, tracer, bound_s=1)
    assert json.loads(tracer.read_line())[0] == "let-go"
    tracer.signal_guardian(signal.SIGSTOP)
    if how == "tracer_dies":
        die(tracer)
    else:
        assert tracer.ask("borrower.close()") is None
    it.send("l")
    it.send("d")
    it.wait_until_both_are_stuck()
    tracer.signal_guardian(signal.SIGCONT)

    assert it.read_line() == "loaded"
    assert end_wait(it) == WHOLE


@pytest.mark.parametrize("where", ["b", "B"], ids=["below", "far below"])
def test_the_guardian_leaves_alone_a_thread_that_is_home(
    begin: Begin, bin_: Path, where: str
) -> None:
    """Which waits for the loader's lock for another reason, from below where its frame lay."""
    it, tracer = begin()
    inside(it, tracer)
    tracer.signal_guardian(signal.SIGSTOP)
    die(tracer)
    it.send("d")
    wait_for(lambda: it.call_of(it.tid) == str(RECVFROM), "the thread's return")
    it.send(f"a {bin_ / 'holding.so'}")
    assert it.read_line() == "constructor"
    it.send(f"{where} {bin_ / 'other.so'}")
    wait_for(lambda: it.call_of(it.tid) == str(FUTEX), "the loader's lock")
    tracer.signal_guardian(signal.SIGCONT)
    wait_for(tracer.guardian_is_gone, "the guardian's end")
    it.send("r")

    assert sorted((it.read_line(), it.read_line())) == ["loaded", "loaded below"]
    assert end_wait(it) == WHOLE
