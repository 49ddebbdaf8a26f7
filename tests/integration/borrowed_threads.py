# SPDX-License-Identifier: Apache-2.0
"""A program whose thread is borrowed (tests/programs/attach/borrowed.c), and the tracer of it: both
do what a test sends them, line by line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PATIENCE_S = 20.0
FUTEX, NANOSLEEP, POLL, RECVFROM = 202, 35, 7, 45
ALL_BUT_SETXID = (1 << 64) - 1 & ~(1 << 8 | 1 << 18 | 1 << 32)
"""A signal mask: the kernel lets nobody block SIGKILL (9) and SIGSTOP (19); 33 is SIGSETXID."""


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
