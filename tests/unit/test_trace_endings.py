# SPDX-License-Identifier: Apache-2.0
"""How a trace ends, on stubs of the driver and of CUPTI, all compiled with a sanitizer: called off,
by a detach, beside a fork; while a thread of CUPTI hands over buffers before, meanwhile and after.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from sonde.collect import inject_abi as abi
from sonde.collect import inject_trace_abi as trace_abi
from sonde.collect.inject_memory import InjectMemory
from sonde.collect.tracing import Tracer
from sonde.errors import TargetRefused
from sonde.readers import device_trace
from stub_driver import build, find

ROOT = Path(__file__).parents[2]
PATIENCE_S = 20
PASSED_ON = 7
"""A child's exit code, after its launches."""


@dataclass(frozen=True)
class Built:
    program: Path
    preload: str
    is_thread: bool


@pytest.fixture(scope="module", params=["address", "thread"])
def built(request, tmp_path_factory) -> Built:
    where = tmp_path_factory.mktemp(request.param)
    flags = (f"-fsanitize={request.param}", "-fno-omit-frame-pointer")
    build(where, *flags, names=("steady",))
    library = where / "sonde-inject-0.so"
    subprocess.run(
        ["cc", "-std=gnu11", "-O1", "-g", "-fPIC", "-shared", "-fvisibility=hidden", *flags,
         "-Wl,-z,nodelete", "-o", library, *sorted((ROOT / "inject").glob("*.c")), "-lpthread"],
        check=True,
    )  # fmt: skip
    name = "asan" if request.param == "address" else "tsan"
    runtime = subprocess.run(
        ["cc", f"-print-file-name=lib{name}.so"], check=True, capture_output=True, text=True
    ).stdout.strip()
    return Built(where / "steady", f"{runtime} {library}", request.param == "thread")


class Running:
    """The program, with a tracer that is ready."""

    def __init__(self, process: subprocess.Popen[str], memory: InjectMemory) -> None:
        self.process = process
        self.memory = memory
        self.tracer = Tracer(process.pid, memory)
        self.tracer.prepare()

    def ask(self, word: str) -> list[int]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return [int(it) for it in self.process.stdout.readline().split()]

    def begin(self, window: int, seconds: float = 8.0) -> None:
        """A trace, until it runs, without waiting for its end."""
        self.memory.ask(window_us=round(seconds * 1e6), window=window)
        self.wait(lambda: self.seen() == abi.Status.WINDOW and self.ask("state")[0] != 0)

    def seen(self) -> int:
        self.memory.heartbeat()
        return self.memory.seen().status

    def wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def holds_a_trace(self) -> bool:
        maps = Path(f"/proc/{self.process.pid}/maps").read_text()
        return trace_abi.TRACE_MEMFD in maps

    def goes_on(self) -> None:
        """It launches, and CUPTI hands over what it was given."""
        _, launches, buffers = self.ask("state")
        time.sleep(0.2)
        _, later, buffers_later = self.ask("state")
        assert later > launches
        assert buffers_later > buffers


@pytest.fixture
def running(built) -> Iterator[Callable[[], Running]]:
    @contextmanager
    def start() -> Iterator[Running]:
        environment = {
            **os.environ, "LD_PRELOAD": built.preload, "SONDE_INJECT": "0:0",
            "STUB_CUPTI_THREAD": "1", "ASAN_OPTIONS": "detect_leaks=0",
            "TSAN_OPTIONS": "exitcode=66",
        }  # fmt: skip
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [built.program], env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        try:
            with find(process.pid) as memory:
                it = Running(process, memory)
                yield it
                it.tracer.close()
            with suppress(BrokenPipeError):
                process.stdin.close()
            assert process.wait(PATIENCE_S) == 0, process.stderr.read()[-6000:]
        finally:
            process.kill()
            process.wait()

    return start


def test_callbacks_are_gone_before_the_memory_is(running):
    with running() as it:
        for _ in range(2):
            trace = device_trace.read(it.tracer.take(0.3), it.process.pid, 0)
            assert len(trace.rows)
            assert it.ask("state")[0] == 0  # nothing is switched on
            assert it.holds_a_trace()
            it.memory.ask(window=0)
            it.memory.heartbeat()
            it.wait(lambda: not it.holds_a_trace())
            it.goes_on()


def test_a_trace_that_is_called_off_ends_at_once_and_another_one_may_follow(running):
    with running() as it:
        began_s = time.monotonic()
        raw = it.tracer.take(9.0, lambda: time.monotonic() - began_s < 0.3)
        assert time.monotonic() - began_s < 6
        assert raw.head["cut"] == 1
        assert 0 < raw.head["closed_ns"] - raw.head["opened_ns"] < 3e9
        assert it.ask("state")[0] == 0
        it.memory.ask(request=abi.Request.WINDOWS)
        again = it.tracer.take(0.2)
        assert again.head["cut"] == 0
        assert device_trace.read(again, it.process.pid, 0).rows.size
        it.goes_on()


def test_where_the_subscription_is_held_by_one_who_was_not_seen_a_trace_is_refused(running):
    with running() as it:
        with pytest.raises(TargetRefused, match="another profiler"):
            it.tracer.take(0.2, taken=True)
        assert it.ask("state")[0] == 0
        assert device_trace.read(it.tracer.take(0.2), it.process.pid, 0).rows.size


def test_a_detach_ends_the_trace_first(running):
    with running() as it:
        it.begin(1)
        assert it.holds_a_trace()
        it.memory.ask(request=abi.Request.LEAVE)
        order = []

        def has_left() -> bool:
            status = it.seen()
            order.append((status, it.ask("state")[0]))
            return status == abi.Status.LEFT

        it.wait(has_left)
        # While anything is switched on, the library is at its trace; then it leaves.
        assert all(status == abi.Status.WINDOW for status, kinds in order if kinds)
        assert order[-1] == (abi.Status.LEFT, 0)
        it.wait(lambda: not it.holds_a_trace())
        assert it.memory.seen().counts["hooks"] == 0
        it.goes_on()


def test_a_fork_while_a_trace_runs_costs_neither_of_both(running, built):
    if built.is_thread:
        pytest.skip("ThreadSanitizer ends a child of a program with threads")
    with running() as it:
        it.begin(1, 2.0)
        for _ in range(3):
            assert it.ask("fork") == [PASSED_ON]
        it.wait(lambda: it.seen() != abi.Status.WINDOW)
        counts = it.memory.seen().counts
        assert counts["window_done"] == 1
        assert counts["window_reason"] == abi.Reason.OK
        assert counts["window_records"] > 0
        assert it.ask("state")[0] == 0
        it.goes_on()
        assert it.ask("fork") == [PASSED_ON]  # with the trace in memory, not yet fetched
