# SPDX-License-Identifier: Apache-2.0
"""A thread with very many waits rests (bpf/wait_rests.h): what is seen of it, and of others."""

from __future__ import annotations

import json
import math
import subprocess
import time

import pytest

pytestmark = pytest.mark.bpf

SECONDS = 8
TICK_S = time.clock_getres(6)  # CLOCK_MONOTONIC_COARSE
AWAKE = 1 / 8
"""Of the slices."""


@pytest.fixture(scope="module")
def heavy(program, record):
    """(recorder, truth)"""
    with record() as recorder:
        done = subprocess.run(
            [program("truth/heavy"), str(SECONDS)], capture_output=True, check=True
        )
    return recorder, json.loads(done.stdout)


def counted(recorder, tid, reason, kind="blocked"):
    [(count, seconds)] = recorder.rows(
        'SELECT sum("count"), sum(ns) / 1e9 FROM activity WHERE tid = ? AND kind = ? AND name = ?',
        tid,
        kind,
        reason,
    )
    return count, seconds


def test_it_is_heavy(heavy):
    recorder, truth = heavy
    assert truth["waited"] > 20_000 * SECONDS, "or this shows nothing"
    [(estimated,)] = recorder.rows(
        "SELECT max(value) FROM metric WHERE series = 'sonde.waits.estimated'"
    )
    assert estimated > truth["waited"] / 2


def test_each_wait_as_long_as_a_slice_is_seen(heavy):
    recorder, truth = heavy
    tid, seconds, polls = truth["poll"]
    count, blocked_s = counted(recorder, tid, "poll")
    assert count == polls
    assert blocked_s == pytest.approx(seconds, abs=polls * TICK_S)
    spans = [
        (row["start_time_ns"], row["end_time_ns"])
        for row in recorder.capture.tables["span"].to_pylist()
        if (row["tid"], row["kind"], row["name"]) == (tid, "blocked", "poll")
    ]
    assert len(spans) == polls
    most_s = TICK_S + 0.01  # and a busy machine
    assert all(abs((end - start) / 1e9 - seconds / polls) < most_s for start, end in spans)


def test_of_shorter_ones_those_in_awake_slices_stand_for_all(heavy):
    recorder, truth = heavy
    tid, _, locks = truth["futex"]
    count, _ = counted(recorder, tid, "futex")
    error = 5 * math.sqrt(locks * (1 - AWAKE) / AWAKE)
    assert count == pytest.approx(locks, abs=error)


def test_sums_of_its_short_waits_are_unbiased(heavy):
    recorder, truth = heavy
    tid = truth["poll"][0]
    [(count,)] = recorder.rows(
        'SELECT sum("count") FROM activity'
        " WHERE tid = ? AND kind = 'runqueue' AND name != 'preempted'",
        tid,
    )
    visible = truth["waited"] / SECONDS * 1.07 * AWAKE
    drawn = SECONDS / 1.07 * (64 + 32 * math.log2(max(1, visible / 64)))
    assert count == pytest.approx(truth["waited"], rel=5 / drawn**0.5 + 0.1)


def test_waits_of_a_thread_beside_it_are_all_counted(heavy):
    recorder, truth = heavy
    tid, seconds, sleeps = truth["sleep"]
    count, blocked_s = counted(recorder, tid, "sleep")
    assert count == pytest.approx(sleeps, rel=0.02)
    ready_s = counted(recorder, tid, "sleep", "runqueue")[1] or 0.0
    assert blocked_s + ready_s == pytest.approx(seconds, rel=0.02)
