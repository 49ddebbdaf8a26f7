# SPDX-License-Identifier: Apache-2.0
"""What a trace costs a process: the paces that it is computed from, and a whole one on stubs."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time

import numpy as np
import pytest

from sonde import _native
from sonde.analyze import trace_price
from sonde.attach import cupti_builds
from sonde.cli import main
from sonde.cli import trace_price as price
from sonde.collect.tracing import Tracer
from sonde.model.device_trace import DeviceTrace, Kind
from sonde.model.launches import REPLAY, CountedLaunch
from stub_driver import build, find

SECOND = 1_000_000_000


def steps(period_ns: float, names: list[str], seconds: float = 1.0, burst: float = 1.0):
    """Launches of steps: each step's within the first part `burst` of its period."""
    count = int(seconds * SECOND / period_ns)
    return [
        (int(period_ns * (step + burst * at / len(names))), name)
        for step in range(count)
        for at, name in enumerate(names)
    ]


def chosen(launches, stride: int, seed: int = 1) -> list[CountedLaunch]:
    """One of each `stride`, at random."""
    chance = random.Random(seed)
    blocks = [launches[at : at + stride] for at in range(0, len(launches) - stride + 1, stride)]
    return [CountedLaunch(*(one := chance.choice(block))[:1], stride, one[1]) for block in blocks]


def trace_of(launches, replayed: bool = False) -> DeviceTrace:
    fields = ("start_ns", "end_ns", "correlation", "name", "graph", "kind")
    rows = np.zeros(len(launches), [(name, "i8") for name in fields])
    numbers = {name: at + 1 for at, name in enumerate(sorted({name for _, name in launches}))}
    rows["start_ns"] = [at for at, _ in launches]
    rows["end_ns"] = rows["start_ns"] + 1000
    rows["name"] = [numbers[name] for _, name in launches]
    rows["correlation"] = np.arange(len(launches)) // (4 if replayed else 1)
    rows["graph"] = int(replayed)
    rows["kind"] = Kind.KERNEL
    end_ns = int(rows["start_ns"].max()) + 1
    names = {number: name for name, number in numbers.items()}
    return DeviceTrace(1, 0, end_ns, 0, rows, names, False, {})


@pytest.mark.parametrize(("slower", "burst"), [(0.0, 1.0), (0.5, 1.0), (0.02, 0.4), (0.2, 0.1)])
def test_the_price_is_that_of_a_step(slower, burst):
    names = [f"kernel{number % 37}" for number in range(120)]
    before = chosen(steps(4e6, names, 1.0, burst), 150)
    found = trace_price.in_trace(before, trace_of(steps(4e6 * (1 + slower), names, 0.3, burst)))
    assert found is not None
    assert found.share == pytest.approx(slower, abs=0.02)
    assert abs(found.share - slower) <= found.half_width + 0.002


@pytest.mark.parametrize("burst", [1.0, 0.5, 0.15])
def test_long_steps_and_bursts_are_compared_by_what_repeats(burst):
    # Many are rare: few of those chosen have their names.
    names = [f"kernel{number if number < 90 else number % 7}" for number in range(788)]
    before = chosen(steps(51e6, names, 1.0, burst), 78)
    found = trace_price.in_trace(before, trace_of(steps(51e6 * 1.01, names, 0.3, burst)))
    assert found is not None
    assert found.share == pytest.approx(0.01, abs=0.02)


def test_replays_are_counted_each_once_and_other_kernels_not_at_all():
    before = [CountedLaunch(at * 1_000_000, 1.0, REPLAY) for at in range(1000)]
    before += [CountedLaunch(at * 1_000_000, 1.0, "a kernel beside") for at in range(500)]
    traced = trace_of(steps(1.1e6, ["a", "b", "c", "d"], 0.5), replayed=True)
    found = trace_price.in_trace(before, traced)
    assert found is not None
    assert found.share == pytest.approx(0.1, abs=0.01)


def test_nothing_is_stated_of_too_few_launches_or_of_other_work():
    before = chosen(steps(4e6, ["a", "b"]), 2)
    assert trace_price.in_trace(before, trace_of(steps(4e6, ["x", "y"]))) is None
    assert trace_price.in_trace(before, trace_of(steps(40e6, ["a", "b"], 0.3))) is None
    assert trace_price.in_trace([], trace_of(steps(4e6, ["a", "b"]))) is None
    mostly_gone = before + chosen(steps(1e6, ["c"]), 1)
    assert trace_price.in_trace(mostly_gone, trace_of(steps(4e6, ["a", "b"]))) is None


def test_a_pace_that_varies_has_a_wide_interval():
    chance = random.Random(3)
    at, launches = 0.0, []
    while at < SECOND:
        at += 2e5 * (1 + 2 * (at // 1.3e8 % 2))
        launches.append((int(at + chance.random() * 1000), "a"))
    found = trace_price.afterwards(chosen(launches, 5), chosen(launches[len(launches) // 2 :], 5))
    assert found is not None
    assert found.half_width > 0.2


def test_it_reads_as_text():
    one = trace_price.Slowdown(0.1234, 0.004)
    assert "12.3 % (± 0.4) longer, in the second" in price.text_of(price.Price(one, one))
    assert "second" not in price.text_of(price.Price(one, None))
    assert "not known" in price.text_of(price.Price(None, one))


@pytest.fixture
def steady(tmp_path):
    """Starts a program that launches, this many ns apart."""
    build(tmp_path, names=("steady",))
    library = tmp_path / "sonde-inject-0.so"
    library.write_bytes(_native.inject_library())
    environment = {**os.environ, "LD_PRELOAD": str(library), "SONDE_INJECT": "0:0"}
    pipe = subprocess.PIPE
    programs = []

    def start(pause_ns: int) -> subprocess.Popen[str]:
        words = [tmp_path / "steady", str(pause_ns)]
        programs.append(
            subprocess.Popen(words, env=environment, stdin=pipe, stdout=pipe, text=True)
        )
        return programs[-1]

    yield start
    for program in programs:
        program.kill()
        program.communicate()


def test_the_command_states_the_price_of_a_trial_before_the_trace(
    steady, monkeypatch, tmp_path, capsys
):
    program = steady(300_000)
    find(program.pid).close()
    monkeypatch.setattr(cupti_builds, "require", lambda pid: cupti_builds.proved()[0])
    monkeypatch.setattr(cupti_builds, "has_subscriber", lambda pid, build: False)
    words = ["trace", str(program.pid), "-d", "0.2", "-o", str(tmp_path / "x.json.gz")]
    args = main.build_command_parser("trace").parse_args([*words, "--no-stacks", "--json"])
    assert args.run(args) == 0
    out, err = capsys.readouterr()
    outcome = json.loads(out)
    assert outcome["kernels"] > 0
    assert outcome["launches_a_second"] > 0
    assert set(outcome["price"]) == {"during", "after"}
    assert "at most" in err
    assert f"trial of {price.TRIAL_S:g} s" in err


class Counting(Tracer):
    """Asks the program for its own count where launches are counted."""

    def _beat(self, seconds, is_enough=None):
        if seconds < 1:
            return super()._beat(seconds, is_enough)
        self.program.stdin.write("state\n")
        began, launched = time.monotonic(), self._state()
        super()._beat(seconds, is_enough)
        self.program.stdin.write("state\n")
        self.truth = (self._state() - launched) / (time.monotonic() - began)
        return None

    def _state(self):
        self.program.stdin.flush()
        return int(self.program.stdout.readline().split()[1])


@pytest.mark.parametrize("pause_ns", [4_000_000, 300_000, 50_000])
def test_launches_a_second_are_those_that_the_program_counts(steady, pause_ns):
    """Also right after the stride changed: what was left of a block counted twice, +16 %."""
    program = steady(pause_ns)
    with find(program.pid) as memory, Counting(program.pid, memory) as tracer:
        tracer.program = program
        tracer.prepare()
        rates = tracer.rates()
        assert rates.launches == pytest.approx(tracer.truth, rel=0.05)
        assert rates.replays == 0
        assert {one.what for one in rates.counted} == {"shorter(float*)"}
        found = price.measured(tracer, rates, tracer.take)
        assert found.after is not None  # the stub's kernels have no times to state `during` by
