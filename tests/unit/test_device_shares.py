# SPDX-License-Identifier: Apache-2.0
"""Shares of the time from runs that were timed one by one: their intervals hold the truth."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import captures
from captures import START_NS, Writer
from sonde.analyze import device_shares as module
from sonde.analyze.bound import explain
from sonde.analyze.device_shares import device_shares, variance_of_sum
from sonde.analyze.timing_error import TABLE, bounds_ns
from sonde.export import verdict as export
from sonde.model.single_runs import SingleRuns, no_single_runs
from sonde.model.timeline import CallKind, CopyDirection, Total, TotalKind
from sonde.model.verdict import DeviceShare
from sonde.recording.timelines import open_timeline

TRACES = Path(__file__).parents[1] / "data/device_time"
RESULTS = Path(__file__).parents[2] / "bench/ground/results"
NAMES = [f"kernel {number}" for number in range(64)]
SECOND_NS = 1_000_000_000
US = 1_000


def runs(rows, call=CallKind.LAUNCH):
    """Runs of (name, length in ns, weight, and more columns by name)."""
    more = [row[3] if len(row) > 3 else {} for row in rows]
    number = np.arange(len(rows)) * 1_000_000

    def column(name, kind, default=0):
        return np.array([one.get(name, default) for one in more], kind)

    return SingleRuns(
        start_ns=number,
        length_ns=np.array([row[1] for row in rows], np.int64),
        weight=np.array([row[2] for row in rows], float),
        track=column("track", np.int32),
        name=np.array([row[0] for row in rows], np.int32),
        call=column("call", np.uint8, int(call)),
        stream=column("stream", np.int64),
        direction=column("direction", np.uint8),
        bytes=column("bytes", np.int64),
    )


def drawn(launches, stride, rng, lost=0.0):
    """Of each block of `stride` launches one, as the library draws; what is lost gives its weight
    to those after it, which take as much again as they stand for."""
    rows, carried = [], 0
    for first in range(0, len(launches), stride):
        at = first + rng.randrange(stride)
        if at >= len(launches):
            continue
        if rng.random() < lost:
            carried += stride
            continue
        taken = min(carried, stride)
        carried -= taken
        rows.append((*launches[at], stride + taken))
    return rows


def of_trace(name, times):
    with gzip.open(TRACES / f"trace-{name}.json.gz") as file:
        held = json.load(file)
    return [(number, ns) for number, ns in held["kernels"]] * times


def of_phases():
    """Long kernels in bursts between short ones, of changing lengths: no step is like another."""
    rng = random.Random(11)
    made = []
    for _ in range(300):
        made += [(0, rng.randrange(2_000, 9_000)) for _ in range(rng.randrange(50, 150))]
        made += [(1, rng.randrange(40_000, 90_000)) for _ in range(rng.randrange(5, 60))]
    return made


@pytest.fixture
def exact(monkeypatch):
    """Runs whose timing has no error."""
    nothing = lambda kind, ns, call_ns=0.0: (0 * ns, 0 * ns)  # noqa: E731
    monkeypatch.setattr(module, "bounds_ns", nothing)


@pytest.mark.parametrize(
    ("launches", "stride", "lost"),
    [
        pytest.param(of_trace("train", 12), 30, 0.0, id="train"),
        pytest.param(of_trace("train", 12), 30, 0.16, id="train, some lost"),
        pytest.param(of_trace("train", 1)[:2_200], 3, 0.0, id="train, most of it timed"),
        pytest.param(of_trace("eager", 20), 50, 0.16, id="eager"),
        pytest.param(of_trace("streams", 10), 10, 0.1, id="streams"),
        pytest.param(of_phases(), 40, 0.1, id="bursts"),
    ],
)
def test_intervals_of_sampling_hold_what_they_promise(exact, launches, stride, lost):
    """Of each 1,000 intervals of all kernels and the three largest, 930 or more hold the truth."""
    truth = Counter()
    for name, ns in launches:
        truth[name] += ns
    whole_ns = 2 * sum(truth.values())
    largest = [name for name, _ in truth.most_common(3)]
    rng, inside, halves = random.Random(3), Counter(), []
    draws = 250
    for _ in range(draws):
        found = device_shares(
            runs(drawn(launches, stride, rng, lost)), NAMES, [], whole_ns, whole_ns
        )
        computing, *kernels = found
        inside["all"] += computing.low <= 0.5 <= computing.high
        halves.append(computing.half_width)
        by_name = {one.name: one for one in kernels}
        for name in largest:
            one = by_name.get(NAMES[name])
            # What is not among the largest by the draw has no interval that could miss.
            inside[name] += one is None or one.low <= truth[name] / whole_ns <= one.high
    assert sum(inside.values()) >= 0.93 * draws * len(inside)
    assert min(inside.values()) >= 0.90 * draws
    assert np.median(halves) < 0.05


def test_of_launches_that_were_all_timed_nothing_is_left_open(exact):
    rows = runs([(number % 3, 1_000 * (number % 3 + 1), 1.0) for number in range(300)])
    computing, *kernels = device_shares(rows, ["a", "b", "c"], [], 1_200_000, 1_200_000)
    assert computing.share == pytest.approx(0.5)
    assert computing.half_width < 0.005, "about a run"
    assert [one.name for one in kernels] == ["c", "b", "a"]
    assert sum(one.share for one in kernels) == pytest.approx(computing.share)


def test_the_variance_is_that_of_neighbours():
    """Blocks that grow slowly differ little from the next: only what a block holds is open."""
    slope = np.linspace(1_000.0, 2_000.0, 500)
    weight = np.full(500, 10.0)
    steep = variance_of_sum(np.random.default_rng(1).permutation(slope), weight)
    assert variance_of_sum(slope, weight) < steep / 10, "what is left are the ends"
    assert variance_of_sum(np.array([]), np.array([])) == 0
    assert variance_of_sum(np.array([100.0]), np.array([10.0])) == 1_000.0**2


def test_the_first_block_may_be_as_long_as_a_guess_made_it():
    """A product of milliseconds: its first block stands for 62 ms, the others for 12."""
    value, weight = np.full(300, 1.6e6), np.full(300, 7.5)
    even = variance_of_sum(value, weight)
    weight[0] = 38
    assert even == pytest.approx((7.5 * 1.6e6) ** 2)
    assert variance_of_sum(value, weight) == pytest.approx((38**2 + 7.5**2) / 2 * 1.6e6**2)


def test_what_timing_leaves_open_is_added_on_each_side():
    rows = runs([(0, 1_000, 100.0)] * 500)
    (computing, _) = device_shares(rows, ["a"], [], SECOND_NS, SECOND_NS)
    assert computing.share == pytest.approx(0.05)
    least = TABLE[CallKind.LAUNCH].least_ns
    assert computing.less == computing.more == pytest.approx(50_000 * least / SECOND_NS)
    assert computing.low == pytest.approx(computing.share - computing.less - computing.sampling)
    assert computing.high == pytest.approx(computing.share + computing.more + computing.sampling)


def test_the_table_holds_what_was_measured():
    """Kernels of which 60 runs or more were timed: their mean has next to no error of sampling."""
    held = json.loads((RESULTS / "h200-device-time.json").read_text())
    means = [
        (one["event_ns"], one["cupti_ns"])
        for loop in held.values()
        for one in loop["truth"]
        if one["event"] >= 60
    ]
    assert len(means) > 20
    for event_ns, cupti_ns in means:
        less, more = bounds_ns(CallKind.LAUNCH, np.array([event_ns]))
        assert event_ns - less[0] <= cupti_ns <= event_ns + more[0]


@pytest.mark.parametrize(
    ("kind", "pair_us", "cupti_us"),
    [
        pytest.param(CallKind.COPY, 5.813, 1.408, id="4 bytes, decode"),
        pytest.param(CallKind.COPY, 8.034, 1.407, id="4 bytes, decode again"),
        pytest.param(CallKind.COPY, 19.473, 5.37, id="small copies within the device, training"),
        pytest.param(CallKind.SET, 9.938, 0.797, id="small sets, training"),
        pytest.param(CallKind.SET, 0.0, 0.842, id="a set behind a product"),
        pytest.param(CallKind.GRAPH_LAUNCH, 139.648, 124.824, id="replay of 40 kernels"),
        pytest.param(CallKind.GRAPH_LAUNCH, 62.537, 58.78, id="replay of 24 kernels"),
    ],
)
def test_the_table_holds_what_was_measured_of_short_ones(kind, pair_us, cupti_us):
    """Means of whole recordings (bench/results/device_truth_h200.json); calls that wait."""
    less, more = bounds_ns(kind, np.array([1e3 * pair_us]), call_ns=20_000.0)
    assert 1e3 * pair_us - less[0] <= 1e3 * cupti_us <= 1e3 * pair_us + more[0]


def test_of_a_longer_copy_the_first_part_alone_may_be_the_host_s():
    less, _ = bounds_ns(CallKind.COPY, np.array([20e3, 25e3, 60e3]), call_ns=1e6)
    assert less == pytest.approx([17e3, 17e3, 40.2e3])


def copy_call(direction, count, ns, moved):
    return Total(
        0, TotalKind.CALL, "cudaMemcpyAsync", CallKind.COPY, ns, count,
        bytes=moved, direction=direction,
    )  # fmt: skip


def copied(direction, lengths, moved, weight=50.0):
    more = {"call": int(CallKind.COPY), "direction": int(direction), "bytes": moved}
    return [(1, ns, weight, more) for ns in lengths]


def test_copies_follow_from_the_bytes_of_all():
    """Twenty copies of 200 were timed, whatever weights they have."""
    direction = CopyDirection.H2D
    rows = runs(copied(direction, [300 * US] * 20, 16 << 20, weight=8.0))
    calls = [copy_call(direction, 200, 200 * 5 * US, 200 * 16 << 20)]
    (one,) = [x for x in device_shares(rows, ["k", "m"], calls, SECOND_NS, SECOND_NS)
              if x.kind == "copy"]  # fmt: skip
    assert (one.name, one.timed) == ("h2d", 20)
    assert one.share == pytest.approx(200 * 300 * US / SECOND_NS)
    assert one.sampling == pytest.approx(0, abs=1e-9)
    assert one.less == pytest.approx(200 * (5 * US + 3 * US) / SECOND_NS), "the call, and events"


def test_a_copy_for_which_the_host_works_may_be_a_third_as_long():
    """Copies to pageable memory: the call takes as long as the pair."""
    direction = CopyDirection.D2H
    kernels = [(0, 1_000 * US, 10.0)] * 49
    rows = runs(kernels + copied(direction, [3_500 * US] * 20, 16 << 20, weight=10.0))
    calls = [copy_call(direction, 200, 200 * 4_000 * US, 200 * 16 << 20)]
    found = device_shares(rows, ["k", "m"], calls, SECOND_NS, SECOND_NS)
    computing, copies = found[0], found[-1]
    assert computing.share == pytest.approx(0.49)
    assert copies.low <= 0.70 / 3 + 0.01
    assert copies.share + computing.share <= 1 + 1e-9, "on one stream nothing overlaps"
    assert copies.high <= 1 - computing.low + 1e-9


def test_one_copy_shows_nothing_of_how_they_differ():
    rows = runs(copied(CopyDirection.H2D, [300 * US], 1 << 20, weight=8.0))
    calls = [copy_call(CopyDirection.H2D, 100, 100 * 5 * US, 100 << 20)]
    one = device_shares(rows, ["k", "m"], calls, SECOND_NS, SECOND_NS)[-1]
    assert (one.low, one.sampling) == (0, pytest.approx(one.share))


def test_kernels_of_several_streams_may_overlap():
    rows = runs([(0, 500 * US, 10.0, {"stream": number % 2}) for number in range(160)])
    computing = device_shares(rows, ["a"], [], SECOND_NS, SECOND_NS)[0]
    assert computing.share == pytest.approx(0.8)
    assert computing.low < 0.4 < 0.8 < computing.high


def test_the_driver_s_report_is_an_upper_limit():
    rows = runs([(0, 500 * US, 10.0)] * 160)
    plain = device_shares(rows, ["a"], [], SECOND_NS, SECOND_NS)[0]
    capped = device_shares(rows, ["a"], [], SECOND_NS, SECOND_NS, reported=0.7)[0]
    assert capped.share == 0.7
    assert capped.low < 0.7 < plain.share < capped.high


def test_without_runs_there_are_none():
    assert device_shares(no_single_runs(), [], [], SECOND_NS, SECOND_NS) == []


def test_collectives_are_not_computing():
    rows = runs([(0, 500 * US, 5.0), (1, 500 * US, 5.0)] * 100)
    names = ["gemm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"]
    found = device_shares(rows, names, [], SECOND_NS, SECOND_NS)
    assert found[0].share == pytest.approx(0.25)
    assert {one.name for one in found[1:]} == set(names)


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0.359, 0.401, "38 % ± 2.1"),
        (0.362, 0.401, "38 % ± 2.1"),
        (0.2, 0.39, "38 % (20 to 39)"),
    ],
)
def test_how_an_interval_is_written(low, high, text):
    one = DeviceShare("computing", "", 0.38, low, high, 0.0, 0.0, 0.0, 9)
    assert one.text == text
    assert one.half_width == pytest.approx((high - low) / 2)


@pytest.fixture
def explained(tmp_path):
    writer = Writer(seconds=5)
    key = writer.process(42, "train")
    stack = writer.stack("main", "cudaDeviceSynchronize")
    writer.calls(
        key, 42, "cudaDeviceSynchronize", count=100, seconds=4.0, op="sync", api="cuda", stack=stack
    )
    for number in range(400):
        start = START_NS + 12_000_000 * number
        length, name = [(800 * US, "gemm"), (200 * US, "mul")][number % 2]
        row = {"kind": "kernel", "name": name, "weight": 10.0, "source": "event", "tid": 42}
        times = {"start_time_ns": start, "end_time_ns": start + length}
        writer.rows["device_run"].append({**key, **row, **times, "grid": "512,1,1"})
    return explain(open_timeline([writer.write(tmp_path / "a.sonde")]))


def test_a_verdict_has_the_intervals_as_text_and_json(explained):
    verdict = explained.verdicts[0]
    computing, gemm, mul = verdict.device_shares
    assert (gemm.name, mul.name) == ("gemm", "mul")
    assert sum(one.ns for one in verdict.kernels) / 4.8e9 == pytest.approx(
        computing.share, rel=0.01
    )
    text = export.render(explained)
    assert f"the device computed {computing.text} of the time, by runs timed singly" in text
    assert f"of the time (95 %): kernels gemm {gemm.text}, mul {mul.text}" in text
    found = export.document(explained)["verdicts"][0]["device_shares"]
    assert [one["kind"] for one in found] == ["computing", "kernel", "kernel"]
    assert found[0]["low"] <= found[0]["share"] <= found[0]["high"]
    assert found[0]["half_width"] == pytest.approx(computing.half_width)


@pytest.mark.parametrize(
    ("began_s", "begin_s"),
    [((0.2,), 0.2), ((-9.0, 0.2), 0.2), ((-9.0,), 0.0), ((-9.0, 4.9), 0.25)],
)
def test_time_is_that_in_which_runs_were_timed(tmp_path, monkeypatch, began_s, begin_s):
    """An event of before the capture is of an earlier recording, if there is one of this."""
    monkeypatch.setattr(  # as a recorder writes it: what is older is in the first chunk
        captures,
        "_in_chunk",
        lambda row, start_ns, length_ns: (
            0
            <= max(row.get("time_ns", row.get("start_time_ns", 0)), START_NS) - start_ns
            < length_ns
        ),
    )
    writer = Writer(seconds=5)
    key = writer.process(42, "train")
    for second in began_s:
        event = {"time_ns": START_NS + round(second * SECOND_NS), **key}
        writer.rows["event"].append({**event, "kind": "timing", "name": "began", "value": 1.0})
    for number in range(100):
        start = START_NS + 250_000_000 + 40_000_000 * number
        row = {"kind": "kernel", "name": "gemm", "weight": 10.0, "source": "event", "tid": 42}
        times = {"start_time_ns": start, "end_time_ns": start + US}
        writer.rows["device_run"].append({**key, **row, **times, "grid": "512,1,1"})
    timeline = open_timeline([writer.write(tmp_path / "a.sonde")])
    assert timeline.timed_ns is not None
    assert timeline.timed_ns[0] == START_NS + round(begin_s * SECOND_NS)


def test_a_verdict_without_intervals_has_no_line_of_them(explained):
    verdict = replace(explained.verdicts[0], device_shares=())
    assert "(95 %)" not in "\n".join(export.of_verdict(verdict))
