# SPDX-License-Identifier: Apache-2.0
"""Every bound is forced, and what did not fit is counted: nothing goes missing in silence."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from sonde import procfs
from sonde.agent import Agent
from sonde.collect import cpu
from sonde.collect.cpu import CpuSampler
from sonde.collect.kernel import Kernel
from sonde.collect.waits import WaitCollector
from sonde.config import Config
from sonde.query import queries

pytestmark = pytest.mark.bpf

HZ = 5000
MISSED_TICKS = 0.06
"""A virtual CPU that its host takes away for a while sees no ticks, yet its time counts as used."""


class HeldBack:
    """A program that waits for `go()`, so that it can be watched from its first instruction."""

    def __init__(self, *command):
        self._process = subprocess.Popen(
            ["sh", "-c", 'read -r _; exec "$@"', "sh", *map(str, command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def go(self):
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def ended(self):
        """What it printed."""
        output, _ = self._process.communicate()
        assert self._process.returncode == 0
        return json.loads(output)

    @property
    def is_running(self):
        return self._process.poll() is None


def test_samples_whose_stack_found_no_room_are_kept_without_it(program):
    burner = HeldBack(program("truth/many_stacks"), 4)
    sampler = CpuSampler(Kernel([burner.pid]), HZ)
    sampler.start()
    burner.go()
    taken = []
    while burner.is_running:
        time.sleep(0.25)
        taken += sampler.take().rows(["stack_id", "count"])
    sampler.stop()
    taken += sampler.take().rows(["stack_id", "count"])
    reported = burner.ended()
    lost = sampler.losses()
    without = sum(count for stack_id, count in taken if stack_id == 0)
    assert set(lost) == {"stack_map_full"}
    assert without == lost["stack_map_full"] > 1000
    assert sum(count for _, count in taken) == pytest.approx(
        reported["seconds"] * HZ, rel=MISSED_TICKS
    )


def test_samples_that_found_no_row_are_counted_by_process(program, monkeypatch):
    monkeypatch.setattr(cpu, "ROOM_S", 0)  # with room for what comes, stacks run out first
    burner = HeldBack(program("truth/many_stacks"), 4)
    sampler = CpuSampler(Kernel([burner.pid]), HZ)
    sampler.start()
    burner.go()
    reported = burner.ended()
    sampler.stop()
    batch = sampler.drain(0, True)
    lost = sampler.losses()
    [(_, columns)] = batch.parts
    assert len(columns["tid"]) >= cpu.LEAST_ROWS - 24
    assert lost["by_process"] > 1000
    assert "count_map_full" not in lost
    assert batch.seen == pytest.approx(reported["seconds"] * HZ, rel=MISSED_TICKS)


def test_waits_that_found_no_row_are_counted_by_process(program):
    many = HeldBack(program("truth/many_threads"), 20_000)
    waits = WaitCollector(Kernel([many.pid]), span_min_ns=10**9, stack_gap_ns=10**7)
    waits.start()
    many.go()
    reported = many.ended()
    waits.stop()
    batch = waits.drain(0, False)
    lost = waits.losses()
    assert lost["by_process"] > 1000
    assert "count_map_full" not in lost
    # Every time one left its CPU it waited for the next, and every new thread waited for its first.
    truth = reported["switches"] + reported["threads"] - reported["first"]
    # The first thread joins the others, 20,000 times: some of its waits stand for all.
    of_first = sum(
        row[10]
        for row in batch.rows["activity"]
        if row[9] == many.pid and (row[1] == "blocked" or row[2] == "preempted")
    )
    assert of_first == pytest.approx(reported["first"], rel=0.4)
    # The rest is what happened before and after the program counted, and what goes missing while
    # another recorder comes or goes (docs/design/overhead.md).
    assert batch.seen - of_first == pytest.approx(truth, rel=0.005)


def test_spans_that_found_no_room_are_counted_and_in_the_totals(program):
    game = HeldBack(program("truth/pingpong"), 20_000)
    waits = WaitCollector(Kernel([game.pid]), span_min_ns=0, stack_gap_ns=10**7)
    waits.start()
    game.go()
    game.ended()
    waits.stop()
    kept = len(waits._bpf.drain_ring("wait_spans", "wait_span", 20_000))
    batch = waits.drain(0, False)
    lost = waits.losses()
    assert set(lost) == {"ring_full"}
    assert kept > 1000
    assert kept + lost["ring_full"] == batch.seen


def test_children_that_could_not_be_watched_are_counted():
    shell = HeldBack("sh", "-c", "/bin/true; /bin/true; /bin/true; echo {}")
    nobody = range(10_000_000, 10_000_000 + 16_384 - 1)
    kernel = Kernel([shell.pid, *nobody])
    CpuSampler(kernel, 99)
    shell.go()
    shell.ended()
    assert kernel.losses() == {"targets_full": 3}


class Memory:
    """A sink that keeps nothing but the size."""

    written_bytes = 0

    def write(self, chunk):
        self.written_bytes += len(chunk)

    def close(self):
        pass

    def losses(self):
        return {}

    def metrics(self):
        return {}


def test_what_the_kernel_side_lost_is_reported_while_it_records(monkeypatch):
    for hung in ("processes_hung", "files_hung"):  # of tests before it in this process
        monkeypatch.setattr(procfs.BROKER.patience, hung, 0)
    shell = HeldBack("sh", "-c", "/bin/true; /bin/true; /bin/true; echo {}")
    nobody = range(10_000_000, 10_000_000 + 16_384 - 1)
    config = Config(pids=frozenset([shell.pid, *nobody]), device_calls=False, tick_s=0.1)
    agent = Agent(config, Memory())
    agent.start()
    shell.go()
    shell.ended()
    agent.run(lambda: agent.live().lost > 0, lambda live: None)
    agent.stop()
    assert agent.live().lost == 3, agent._losses._known


def test_losses_reach_the_capture_and_the_summary(record):
    nap = (
        "import threading, time\n"
        "def naps():\n"
        "    end = time.monotonic() + 4\n"
        "    while time.monotonic() < end: time.sleep(0.0005)\n"
        "threads = [threading.Thread(target=naps) for _ in range(8)]\n"
        "[t.start() for t in threads]\n"
        "[t.join() for t in threads]\n"
    )
    with record(wait_span_ms=0.1, tick_s=4, chunk_s=4) as recorder:
        subprocess.run([sys.executable, "-c", nap], check=True)
    lost = recorder.losses()
    assert lost["waits.ring_full"] > 100
    assert recorder.outcome["lost"] == sum(lost.values())
    losses = {loss.name: loss for loss in queries.losses(recorder.session)}
    assert losses["waits.ring_full"].amount == lost["waits.ring_full"]
    assert losses["waits.ring_full"].text
    command = [sys.executable, "-m", "sonde", "report", str(recorder.path), "--format", "table"]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "ring_full" in report or losses["waits.ring_full"].text in report
