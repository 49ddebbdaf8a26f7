# SPDX-License-Identifier: Apache-2.0
"""More threads than the maps have rows for: rows get coarser, and totals stay the kernel's own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from sonde.collect import waits
from sonde.collect.kernel import Kernel
from sonde.collect.waits import WaitCollector

pytestmark = pytest.mark.bpf

PROCESSES, THREADS = 1500, 6
SECONDS = 4
TICK_S = 1.0
EXACT = 0.03


def schedstat(pids):
    """(ns on a CPU, ns ready without one, times a CPU was given) of all threads of processes."""
    totals = [0, 0, 0]
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for i, word in enumerate((task / "schedstat").read_bytes().split()):
                totals[i] += int(word)
    return totals


class Crowd:
    """tests/programs/truth/many_processes.c, its threads at rest before and after their naps."""

    def __init__(self, program, processes, threads, seconds):
        command = [program, str(processes), str(threads), str(seconds)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )
        if self._process.stdout.readline() != "ready\n":
            self.end()
            pytest.skip(f"a limit on tasks allows no {processes} × {threads} threads here")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self.pids = [int(pid) for pid in children.read_text().split()]
        assert len(self.pids) == processes

    def go(self):
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def await_done(self):
        assert self._process.stdout.readline() == "done\n"
        time.sleep(0.3)  # the last of them is on its way to sleep

    def end(self):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture
def crowd(program):
    it = Crowd(program("truth/many_processes"), PROCESSES, THREADS, SECONDS)
    yield it
    it.end()


class Totals:
    """Sums over what a collector of waits hands over."""

    def __init__(self):
        self.count = self.ns = self.ready_ns = self.weighted_ns = 0
        self.coarse_ns = 0
        self.pids = set()

    def add(self, batch):
        self.count += batch.seen
        for _, kind, *_, pid, _, tid, _, ns, _, _, _, _ in batch.rows.get("activity", ()):
            self.pids.add(pid)
            self.ns += ns
            self.ready_ns += ns * (kind == "runqueue")
            self.coarse_ns += ns * (tid == 0)
        for *_, weight_ns, _ in batch.rows.get("sample", ()):
            self.weighted_ns += weight_ns


def watch(crowd, collector):
    """What was recorded of the naps, and what the kernel has counted: (totals, ns off the CPU of
    all threads, ns that they were ready, times that they got a CPU)."""
    totals = Totals()
    collector.start()
    before = schedstat(crowd.pids)
    began_ns = time.monotonic_ns()
    collector.drain(0, to_the_end=True)
    crowd.go()
    for _ in range(int(SECONDS / TICK_S) + 1):
        time.sleep(TICK_S)
        totals.add(collector.drain(0, to_the_end=False))
    crowd.await_done()
    passed_ns = time.monotonic_ns() - began_ns
    totals.add(collector.drain(0, to_the_end=True))
    after = schedstat(crowd.pids)
    collector.stop()
    on_cpu_ns, ready_ns, runs = (now - then for now, then in zip(after, before, strict=True))
    return totals, len(crowd.pids) * THREADS * passed_ns - on_cpu_ns, ready_ns, runs


def test_waits_of_more_threads_than_there_are_rows_for_keep_their_totals(crowd):
    collector = WaitCollector(Kernel(crowd.pids), span_min_ns=10**10, stack_gap_ns=10**7)
    totals, off_cpu_ns, ready_ns, runs = watch(crowd, collector)
    lost = collector.losses()
    assert lost["by_process"] > 1000  # or this shows nothing
    assert "count_map_full" not in lost
    assert totals.coarse_ns > 0
    assert totals.ns == pytest.approx(off_cpu_ns, rel=EXACT)
    assert totals.weighted_ns == pytest.approx(off_cpu_ns, rel=EXACT)
    assert totals.count == pytest.approx(runs, rel=EXACT)
    # The kernel's count begins where a wake-up reaches the run queue, ours where it is sent.
    assert totals.ready_ns > (1 - EXACT) * ready_ns
    assert totals.pids == set(crowd.pids)


def test_where_even_processes_find_no_row_what_is_left_is_counted_together(crowd, monkeypatch):
    monkeypatch.setattr(waits, "_room", lambda: {"waits": 512, "waits_spare": 256})
    collector = WaitCollector(Kernel(crowd.pids), span_min_ns=10**10, stack_gap_ns=10**7)
    totals, off_cpu_ns, _, runs = watch(crowd, collector)
    lost = collector.losses()
    assert lost["together"] > 1000
    assert "count_map_full" not in lost
    assert totals.ns == pytest.approx(off_cpu_ns, rel=EXACT)
    assert totals.count == pytest.approx(runs, rel=EXACT)
    assert 0 in totals.pids
