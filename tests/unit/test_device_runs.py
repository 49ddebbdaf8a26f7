# SPDX-License-Identifier: Apache-2.0
"""Estimates from timed launches: unbiased, and their intervals hold what they promise."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from sonde.model.profile import ProfileKind
from sonde.query.capture import Capture, CaptureInfo
from sonde.query.device_callers import shares_of
from sonde.query.device_runs import device_runs, kinds_seen
from sonde.query.schema import TABLES
from sonde.query.session import Session

DATA = Path(__file__).parents[1] / "data/device_time"
INFO = CaptureInfo(
    path=Path("x"), size_bytes=0, id="", version="", host={}, start_ns=0, end_ns=1_000_000_000,
    wall_offset_ns=0, chunks=1, chunks_damaged=0, chunks_missing=0, damaged_bytes=0, tail_bytes=0,
    paused_ns=0, clean_end=True,
)  # fmt: skip


def session(runs):
    """A session over runs of (process, kind, name, duration, weight, window, bytes)."""
    columns = {field.name: [] for field in TABLES["device_run"]}
    for pid, kind, name, ns, weight, window, moved in runs:
        row = {
            "start_time_ns": 1_000, "end_time_ns": 1_000 + ns, "kind": kind, "name": name,
            "source": "event", "pid": pid, "weight": weight, "window": window, "bytes": moved,
        }  # fmt: skip
        for field in TABLES["device_run"]:
            text = pa.types.is_dictionary(field.type)
            columns[field.name].append(row.get(field.name, "" if text else 0))
    table = pa.table(
        [
            pa.array(columns[field.name], pa.string()).dictionary_encode()
            if pa.types.is_dictionary(field.type)
            else pa.array(columns[field.name], field.type)
            for field in TABLES["device_run"]
        ],
        schema=TABLES["device_run"],
    )
    tables = {name: schema.empty_table() for name, schema in TABLES.items()}
    return Session(Capture(INFO, {**tables, "device_run": table}))


def trace(name):
    with gzip.open(DATA / f"trace-{name}.json.gz") as file:
        held = json.load(file)
    return [(str(number), ns) for number, ns in held["kernels"]]


def test_sums_of_one_process():
    runs = [(1, "kernel", "k", 1_000, 1.0, 0, 0), (1, "kernel", "k", 3_000, 1.0, 0, 0)]
    runs += [(1, "copy", "(copy h2d)", 500, 4.0, 0, 1_000)]
    kernel, copy = device_runs(session(runs))
    assert (kernel.count, kernel.ns, kernel.mean_ns, kernel.p50_ns) == (2, 4_000, 2_000, 2_000)
    assert kernel.error_ns == 0, "all were timed"
    assert (copy.count, copy.ns, copy.bytes) == (4, 2_000, 4_000)
    assert copy.error_ns == round(1.96 * (4 * 3 * 500**2) ** 0.5)


def test_windows_are_chosen_whole():
    runs = [(1, "kernel", "k", ns, 10.0, window, 0) for window, ns in ((1, 90), (2, 100), (3, 110))]
    (one,) = device_runs(session(runs))
    assert one.error_ns == round(1.96 * (3 * 100.0**2) ** 0.5), "3 windows, totals 100 apart"


def test_a_capture_without_any_does_not_speak_of_devices():
    assert ProfileKind.GPU_TIME not in kinds_seen(session([]))
    assert ProfileKind.GPU_TIME in kinds_seen(session([(1, "kernel", "k", 1, 1.0, 0, 0)]))


@pytest.mark.parametrize(
    ("loop", "chance"), [("eager", 0.1), ("train", 0.25), ("graph", 0.25), ("streams", 0.25)]
)
def test_intervals_cover_what_they_promise(loop, chance):
    """A whole trace of an H200, of which every draw takes each launch with the same chance."""
    kernels = trace(loop)
    truth, launched = Counter(), Counter()
    for name, ns in kernels:
        truth[name] += ns
        launched[name] += 1
    common = [name for name, count in launched.items() if count * chance >= 40]
    kept = set(common)
    rng = random.Random(4)
    draws = 1_000
    runs = [
        (draw + 1, "kernel", name, ns, 1 / chance, 0, 0)
        for draw in range(draws)
        for name, ns in kernels
        if rng.random() < chance and name in kept
    ]
    covered, mean = Counter(), Counter()
    for it in device_runs(session(runs)):
        covered[it.name] += abs(it.ns - truth[it.name]) <= it.error_ns
        mean[it.name] += it.ns / draws
    assert common
    for name in common:
        assert 0.925 <= covered[name] / draws <= 0.975, name
        assert mean[name] == pytest.approx(truth[name], rel=0.02)
    assert 0.93 <= sum(covered.values()) / (draws * len(common)) <= 0.97


def test_the_share_of_a_function_and_its_interval():
    """Each function asked for runs of another length: a whole trace, drawn 1,000 times."""
    rng = random.Random(5)
    truth = {f"f{n}": n / 55 for n in range(1, 11)}
    chance, inside, draws_seen = 0.2, 0, 0
    for _ in range(1_000):
        draw = {
            name: [(1_000 * n, 1 / chance) for _ in range(60) if rng.random() < chance]
            for n, name in enumerate(truth, 1)
        }
        sums = {
            name: (
                sum(w * d for d, w in runs), sum(w * (w - 1) * d * d for d, w in runs)
            )
            for name, runs in draw.items()
        }  # fmt: skip
        for name, (share, error) in shares_of(sums).items():
            inside += abs(share - truth[name]) <= error
            draws_seen += 1
    assert 0.93 <= inside / draws_seen <= 0.97
