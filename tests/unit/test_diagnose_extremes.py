# SPDX-License-Identifier: Apache-2.0
"""Numbers that nothing could have counted go through diagnosis: counters that went back, products
that are too large. They may be any number; they must not end it."""

from __future__ import annotations

import random
from collections import deque

import msgspec
import pytest
from test_diagnose import PLACES, VICTIM, window

from sonde.agent.explainer import Explainer
from sonde.agent.moments import LARGEST, MomentMaker
from sonde.agent.slowdown_watcher import LOOKS_S, Watcher
from sonde.collect.collector import Batch
from sonde.diagnose.detector import Detector
from sonde.diagnose.explain import explain
from sonde.diagnose.moments import Facts, Window
from sonde.diagnose.selection import Selection
from sonde.model.process import Process
from sonde.model.rows import Rows

U64 = (1 << 64) - 1
EXTREMES = (0, 1, 2, 10**6, 1 << 31, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, U64 - 4, U64)
TIMES = (0, 1, 10**6, 250_000_000, 10**18, 1 << 63, U64, U64 * U64)
KINDS = ("blocked", "runqueue", "block", "block-queue", "device", "tcp")
REASONS = ("read", "sync to disk", "socket", "futex", "stopped", "sleep", "preempted", "page fault")
PIDS = (VICTIM, 2, 7, 200, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
TICK_NS = 250_000_000


def tick(chance: random.Random, extreme: float) -> list[Batch]:
    """Rows of one tick; `extreme`: how many of the numbers are."""

    def number(usual: int, among=TIMES) -> int:
        return chance.choice(among) if chance.random() < extreme else usual

    activity = [
        (
            0, chance.choice(KINDS), chance.choice(REASONS), "", "read", "", 0, pid, 0,
            chance.choice((pid, pid + 1)), number(3, EXTREMES), number(10**7), number(4096),
            number(10**6), chance.choice(PIDS), chance.choice(PIDS),
        )
        for pid in (VICTIM, chance.choice(PIDS)) for _ in range(4)
    ]  # fmt: skip
    usage = [
        (0, pid, number(0, EXTREMES), number(10**8), *(number(1, EXTREMES) for _ in range(12)))
        for pid in {VICTIM, chance.choice(PIDS)}
    ]
    weights = (1.0, float(number(10**6)), 0.0)
    sample = [(0, "blocked", "read", VICTIM, 0, VICTIM, number(0, EXTREMES), *weights)]
    return [Batch(rows=Rows(activity=activity, usage=usage, sample=sample))]


@pytest.mark.parametrize("extreme", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_no_number_ends_what_notices_and_explains(seed, extreme):
    chance = random.Random(f"{seed} {extreme}")
    maker, detector, selection = MomentMaker(lambda _: (), 1e7), Detector(), Selection()
    moments = []
    for at in range(40):
        start_ns = at * TICK_NS
        moment = maker.make(start_ns, start_ns + TICK_NS, tick(chance, extreme), {VICTIM})
        detector.add(moment, PLACES, {7})
        selection.take(moment, maker.starts, {7})
        moments.append(moment)
    for one in (found for moment in moments for found in moment.processes.values()):
        numbers = [it for part in msgspec.to_builtins(one)[0:1] for it in part]
        assert all(it <= LARGEST for it in numbers)
        assert all(wait.blocked_ns <= 2 * TICK_NS for wait in one.waits)
    facts = [Facts(time_ns=chance.choice(EXTREMES)) for _ in range(2)]
    for fact in facts:
        fact.throttled_s, fact.quota = float(chance.choice(TIMES)), float(chance.choice(TIMES))
        fact.memory_limit = fact.memory_usage = chance.choice(EXTREMES)
        fact.cpu_busy = {0: float(chance.choice(TIMES)), 1: 0.5}
    whole = window(moments[30:], moments[:30])
    whole = msgspec.structs.replace(whole, facts=facts)
    again = msgspec.json.decode(msgspec.json.encode(whole), type=Window)  # as the child gets it
    for is_last in (False, True):
        verdict = explain(again, is_last_look=is_last)
        assert verdict is None or msgspec.json.encode(verdict)


def test_a_look_that_fails_is_counted_and_the_next_one_is_made(monkeypatch):
    monkeypatch.setattr(Explainer, "start", lambda _: None)
    asked = []
    monkeypatch.setattr(Explainer, "ask", lambda _, window, **__: asked.append(window.victim))
    failures = []
    watcher = Watcher(
        lambda *_: None, lambda _: (), lambda pid, start: Process(pid, start), running, 49,
        failed=failures.append,
    )  # fmt: skip
    reads = deque([OverflowError("Python int too large to convert to C long")])

    def read(pid, *_, **__):
        if reads:
            raise reads.popleft()
        return Facts()

    monkeypatch.setattr(watcher._facts, "read", read)
    now_ns = 10**12
    for at in range(120):
        # Its time ready and without a CPU rises, for a while, twice.
        ready = TICK_NS if 40 <= at < 60 or at >= 110 else 0
        cpu = TICK_NS - ready
        row = (0, VICTIM, 0, max(cpu, TICK_NS // 5), ready, *[1] * 11)
        waits = (0, "runqueue", "preempted", "", "", "", 0, VICTIM, 0, VICTIM, 5, ready, 0, 0, 0, 0)
        batch = Batch(rows=Rows(activity=[waits], usage=[row]))
        watcher.on_tick(now_ns, now_ns + TICK_NS, [batch])
        now_ns += TICK_NS
    assert [type(it) for it in failures] == [OverflowError]
    assert watcher.losses["diagnose.looks"] == 1
    assert asked == [VICTIM] * len(LOOKS_S)


def running(pid: int) -> Process:
    return Process(pid, 0)
