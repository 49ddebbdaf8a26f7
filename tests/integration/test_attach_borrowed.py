# SPDX-License-Identifier: Apache-2.0
"""What becomes of a thread that is borrowed, at known points of the load: the tracer dies there, or
is late, or another thread holds what the load waits for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench import storms
from borrowed_threads import (
    ALL_BUT_SETXID,
    FUTEX,
    HOOK,
    NANOSLEEP,
    PATIENCE_S,
    POLL,
    RECVFROM,
    WHOLE,
    Begin,
    Borrowed,
    Conversation,
    Tracer,
    die,
    end_wait,
    inside,
    on_one_cpu,
    run_first,
    wait_for,
)

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or os.uname().machine != "x86_64", reason="needs root on x86-64"
)


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
import sys, time
print("here", flush=True)
input()
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    pass
"""


@contextmanager
def cpu_taken(it: Borrowed, tracer: Tracer, seconds: float) -> Iterator[Conversation]:
    """The CPU of the thread is somebody else's, for some time from a line on; the tracer has
    another one."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("one CPU")
    os.sched_setaffinity(it.tid, {cpus[0]})
    os.sched_setaffinity(tracer.process.pid, {cpus[1]})
    run_first(tracer.process.pid, 1)
    spins = Conversation(sys.executable, "-c", SPINS, str(seconds))
    try:
        assert spins.read_line() == "here"
        os.sched_setaffinity(spins.process.pid, {cpus[0]})
        run_first(spins.process.pid, 1)
        yield spins
        assert spins.process.wait(PATIENCE_S) == 0
    finally:
        spins.kill()


def test_a_thread_that_stops_late_is_let_go_and_borrowed_again(begin: Begin) -> None:
    """Its CPU is somebody else's, for longer than its stop is waited for."""
    it, tracer = begin(dlopen="mark")
    with cpu_taken(it, tracer, 0.4) as spins:
        spins.send("")
        late = tracer.ask(f"load({RECVFROM}, 60)")

    assert late == ["passed-over", "it did not stop", "borrow", True]
    wait_for(lambda: tracer.ask(f"load({RECVFROM}, 60)")[0] == "done", "a load")
    assert end_wait(it) == WHOLE


def test_a_thread_that_stops_late_is_not_interrupted_by_the_tracers_end(begin: Begin) -> None:
    """Its call would answer EINTR."""
    it, tracer = begin("timed", dlopen="mark")
    with cpu_taken(it, tracer, 0.4) as spins:
        spins.send("")
        late = tracer.ask(f"load({RECVFROM}, 60)")
        assert tracer.ask("borrower.close()") is None
        tracer.kill()

    assert late == ["passed-over", "it did not stop", "borrow", True]
    assert end_wait(it) == WHOLE


def test_a_load_without_a_cpu_is_waited_for(begin: Begin) -> None:
    """It comes home as it left: to let it go would bring it home no sooner."""
    it, tracer = begin("poll")
    with cpu_taken(it, tracer, 2.5) as spins:
        inside(it, tracer, bound_s=0.5, call=POLL)
        spins.send("")
        it.send("d")
        outcome = json.loads(tracer.read_line())

    assert outcome[0] == "done", outcome
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
    inside(it, tracer, call=POLL)
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
