# SPDX-License-Identifier: Apache-2.0
"""The device-call collector alone, beside programs that know what they called."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sonde import _native, apis
from sonde.collect.device_calls import DeviceCalls
from sonde.collect.kernel import Kernel

PATIENCE_S = 120


class Program:
    """A program at work. With `hold` it waits until `go`."""

    def __init__(
        self, *command: object, env: Mapping[str, str] | None = None, user: int | None = None
    ) -> None:
        self.process = subprocess.Popen(
            [str(part) for part in command],
            env={**os.environ, **(env or {})},
            user=user,
            group=user,
            extra_groups=None if user is None else [],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_for(self, line: str) -> None:
        """Wait until the program prints this line."""
        assert self.process.stdout is not None
        while True:
            text = self.process.stdout.readline()
            assert text, f"ended without printing {line!r}"
            if text.strip() == line:
                return

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()


class DeviceWatch:
    """Collects until the block ends; sums what it saw.

    `budget` is large: these tests ask for totals, and the budget has separate tests.
    """

    def __init__(
        self, *, launches: bool = False, budget: float = 100.0, pids: list[int] | None = None
    ) -> None:
        self.kernel = Kernel(pids)
        self.collector = DeviceCalls(self.kernel, apis.load(), launches=launches, budget=budget)
        self._processes = _native.ProcessEvents()
        self._lost = 0
        self.calls: Counter[tuple[int, str, str, int]] = Counter()
        """By (pid, function, direction, status)."""
        self.bytes: Counter[tuple[int, str, str, int]] = Counter()
        self.ns: Counter[tuple[int, str, str, int]] = Counter()
        self.samples: dict[tuple[int, str], list[tuple[int, float, float, float]]] = defaultdict(
            list
        )
        """By (pid, function): stack, weighted count, ns, bytes."""
        self.stacks: dict[int, tuple[list[int], list[int]]] = {}
        self.spans: list[Mapping[str, object]] = []
        self.events: list[tuple[object, ...]] = []

    def __enter__(self) -> DeviceWatch:
        self.collector.start()
        self.poll_events()
        return self

    def __exit__(self, *_: object) -> None:
        self.collector.stop()

    def poll_events(self, seconds: float = 0.0) -> None:
        """Follow processes, as the agent does between its ticks."""
        until = time.monotonic() + seconds
        while True:
            self._processes.wait(10)
            self.collector.on_process_events(self._processes.drain())
            if self._processes.lost > self._lost:
                self._lost = self._processes.lost
                self.collector.on_events_lost()
            if time.monotonic() >= until:
                return

    def follow(self, program: Program, line: str) -> None:
        """Follow processes until the program prints this line and what it maps by then is known."""
        assert program.process.stdout is not None
        while not select.select([program.process.stdout], [], [], 0)[0]:
            self.poll_events()
        program.wait_for(line)
        self.poll_events(0.1)  # that events were lost is known with the next event only
        deadline = time.monotonic() + PATIENCE_S
        while self.collector.backlog:
            assert time.monotonic() < deadline, "the collector does not keep up"
            self.poll_events()

    def drain(self) -> None:
        batch = self.collector.drain(time.monotonic_ns(), True)
        tables: Mapping[str, Any] = batch.rows
        for row in tables.get("activity", []):
            _, _, function, _, _, direction, status, pid, _, _, count, ns, size, *_ = row
            key = (pid, function, direction, status)
            self.calls[key] += count
            self.bytes[key] += size
            self.ns[key] += ns
        for row in tables.get("sample", []):
            _, _, function, pid, _, _, stack, count, ns, size = row
            self.samples[pid, function].append((stack, count, ns, size))
        self.events += batch.rows.get("event", [])
        self.spans += batch.spans
        for walk in self.kernel.walks(list(batch.stacks)):
            self.stacks[walk.id] = (walk.kernel, walk.user)

    def finish(self, *programs: Program) -> None:
        """Follow until the programs have ended; then read what is left."""
        tick = time.monotonic()
        deadline = tick + PATIENCE_S
        while any(program.process.poll() is None for program in programs):
            assert time.monotonic() < deadline, "a program does not end"
            self.poll_events()
            if time.monotonic() - tick > 0.2:
                tick = time.monotonic()
                self.drain()
        for program in programs:
            assert program.process.stdout is not None
            program.lines = program.process.stdout.read().splitlines()
            assert program.process.returncode == 0
        self.poll_events()
        self.drain()

    def run(self, *command: object, env: Mapping[str, str] | None = None) -> Program:
        """Run a program to its end."""
        program = Program(*command, env=env)
        self.finish(program)
        return program

    def totals(self, pid: int) -> dict[str, tuple[int, int]]:
        """Calls and bytes of a process by function."""
        found: dict[str, tuple[int, int]] = {}
        for key, count in self.calls.items():
            if key[0] == pid:
                calls, size = found.get(key[1], (0, 0))
                found[key[1]] = (calls + count, size + self.bytes[key])
        return found

    def notes_of(self, name: str) -> list[str]:
        """What was reported of probes under a name."""
        return [str(row[6]) for row in self.events if row[2] == name]


def truth_of(program: Program) -> dict[str, tuple[int, int]]:
    """What a program reports it called: lines of "function count bytes"."""
    found = {}
    for line in program.lines:
        function, count, size = line.split()
        found[function] = (int(count), int(size))
    return found


def compare(watch: DeviceWatch, program: Program) -> None:
    """Counts, bytes and directions of every function that the program speaks of are the truth."""
    truth = truth_of(program)
    assert truth
    seen = watch.totals(program.pid)
    assert {function: seen.get(function) for function in truth} == truth
    for function, direction in (
        ("clEnqueueWriteBuffer", "h2d"),
        ("clEnqueueReadBuffer", "d2h"),
        ("clEnqueueCopyBuffer", "d2d"),
    ):
        if function in truth:
            assert watch.calls[program.pid, function, direction, 0] == truth[function][0]
    assert watch.collector.losses() == {}


OPENCL = Path("/usr/lib/x86_64-linux-gnu/libOpenCL.so.1")
VENDORS = {"OCL_ICD_VENDORS": "/etc/OpenCL/vendors"}
