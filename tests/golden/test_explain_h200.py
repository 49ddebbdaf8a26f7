# SPDX-License-Identifier: Apache-2.0
"""Programs with known causes, recorded on an H200, and what explain makes of them here.

Each is a few steps of a run that the rules were made with (seeds 0 and 1 of bench/explain), as
torch.profiler and Sonde recorded it. Accuracy on unseen runs is in docs/lab/explain.md.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sonde.analyze.bound import explain
from sonde.export import verdict as text
from sonde.model.causes import Bound, CauseDetail
from sonde.model.timeline import DeviceUse
from sonde.recording.timelines import open_timeline

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "data" / "explain"

sys.path.insert(0, str(ROOT))
from bench.explain import truth  # noqa: E402
from bench.explain.expected import EXPECTED, UNPROVED, right_bound  # noqa: E402


def explained(kind: str, with_waits: bool = True):
    paths = [RUNS / f"{kind}.json.gz", *([RUNS / f"{kind}.sonde"] if with_waits else [])]
    return explain(open_timeline(paths))


def test_every_program_is_here():
    assert {path.name.split(".")[0] for path in RUNS.glob("*.json.gz")} == set(EXPECTED)


@pytest.mark.parametrize("kind", EXPECTED)
def test_the_cause_is_named(kind):
    bound, words, _ = EXPECTED[kind]
    bound = UNPROVED.get(bound, bound)  # these records do not show what other processes did
    (verdict,) = explained(kind).verdicts

    assert verdict.bounds[0].key == bound, verdict.evidence
    named = [cause for cause in verdict.causes if cause.bound == bound]
    texts = [
        t for one in named for t in (one.key, one.detail, *(at.function for at in one.locations))
    ]
    assert not words or any(word in text for word in words for text in texts), texts


@pytest.mark.parametrize("kind", [kind for kind, known in EXPECTED.items() if not known[2]])
def test_the_trace_alone_names_it_where_the_device_side_suffices(kind):
    (verdict,) = explained(kind, with_waits=False).verdicts

    bound = EXPECTED[kind][0]
    assert verdict.bounds[0].key == UNPROVED.get(bound, bound), verdict.evidence


def test_another_process_is_named_once_the_driver_reports_that_it_used_the_device():
    timeline = open_timeline([RUNS / "rival_tenant.json.gz"])
    times = np.arange(timeline.start_ns, timeline.end_ns, 10_000_000)
    use = DeviceUse(4242, 0, times, np.full(len(times), 0.6))
    listed = {track.pid: [0] for track in timeline.tracks if track.pid}
    (verdict,) = explain(replace(timeline, busy_of=[use], gpus_of=listed)).verdicts

    assert verdict.bounds[0].key == Bound.GPU_CONTENTION
    assert verdict.bounds[0].share == pytest.approx(0.62, abs=0.01)
    assert any("process 4242 used the device for 60 %" in line for line in verdict.evidence)


@pytest.mark.parametrize("kind", EXPECTED)
def test_blame_sums_to_the_time_without_a_kernel(kind):
    (verdict,) = explained(kind).verdicts

    stalled = verdict.window_ns * (1 - verdict.computing)
    assert sum(cause.ns for cause in verdict.causes) == pytest.approx(stalled, abs=2)


@pytest.mark.parametrize(
    ("kind", "step_ms", "operations"),
    [
        ("transformer", 11.75, 78),
        ("slow_loader", 5.03, 8),
        ("item_every_step", 0.111, 2),
        ("rival_tenant", 6.4, 100),
        ("checkpoint_fsync", 1.95, 6),
        ("compiled_item", 1.0, 5),
        ("small_copies", 3.0, 141),
        ("small_kernels", 1.486, 124),
        ("triton_small", 4.8, 92),
        ("page_faults", 86, 6),
        ("graph_replay", 3.125, 32),
        ("pageable_copy", 3.376, 8),
    ],
)
def test_steps_are_found_at_their_length(kind, step_ms, operations):
    """Lengths are those that the programs measured themselves (of the whole run)."""
    table = explained(kind).verdicts[0].steps

    assert table.operations == operations
    assert sum(table.duration_ns) / table.count / 1e6 == pytest.approx(step_ms, rel=0.06)


@pytest.mark.parametrize("kind", EXPECTED)
def test_idle_time_and_steps_are_those_of_a_plain_sweep_over_the_trace(kind):
    """Steps where the recording holds them: by the calls that the program's own loop made."""
    true = truth.of_trace(RUNS / f"{kind}.json.gz")
    (verdict,) = explained(kind).verdicts
    found = verdict.steps

    assert verdict.idle == pytest.approx(true.idle, abs=0.001)
    ends = [a + b for a, b in zip(found.start_ns, found.duration_ns, strict=True)]
    error = true.step_error(found.start_ns, ends)
    if kind not in CUT_WITHIN_STEPS:
        assert error <= 0.01, (found.anchor, found.count, len(true.begins_ns))


CUT_WITHIN_STEPS = {
    *("copy_bound", "compute_bound", "transformer", "graph_replay"),
    *("memory_bound", "serialised_streams", "jax_products"),
}
"""Of their functions, which alone show their steps, the recordings hold too few."""


@pytest.mark.parametrize(
    ("cost", "rest", "bound"),
    [
        (0.3, 0.0, Bound.SYNCHRONIZATION),
        (0.1, 0.0, Bound.COMPUTE),  # all it waits for is too little to be its bound
        (0.1, 0.08, Bound.SYNCHRONIZATION),
        (0.1, 0.3, Bound.LAUNCH),
        (None, 0.0, Bound.SYNCHRONIZATION),
    ],
)
def test_what_is_right_follows_from_what_was_measured(cost, rest, bound):
    assert right_bound("item_every_step", cost, rest) == bound


def test_without_the_machines_waits_it_names_what_it_cannot_know():
    notes = explained("lock_held", with_waits=False).notes
    assert "sonde record" in notes[0]
    assert not explained("lock_held").notes


def test_a_quota_that_is_spent_within_a_launch_is_not_launch_overhead():
    """Of 63 ms, 44 passed in one call of cuLaunchKernelEx whose thread had no CPU."""
    (verdict,) = explained("delays/cpu_quota").verdicts

    assert verdict.bounds[0].key == Bound.CPU_CONTENTION
    (waited,) = [cause for cause in verdict.causes if cause.bound == Bound.CPU_CONTENTION]
    assert waited.share == pytest.approx(0.70, abs=0.02)
    assert waited.detail == CauseDetail.QUOTA
    assert sum(cause.share for cause in verdict.causes if cause.bound == Bound.LAUNCH) < 0.02


def test_a_checkpoint_that_is_written_beside_the_devices_work_has_the_gaps_behind_it():
    """fsync ends before the device is done; without it the next launches would be early enough."""
    (verdict,) = explained("delays/checkpoint_fsync", with_waits=False).verdicts

    assert verdict.bounds[0].key == Bound.IO
    (waited,) = [cause for cause in verdict.causes if cause.bound == Bound.IO]
    assert waited.share == pytest.approx(0.15, abs=0.01)
    assert waited.locations[0].function.startswith("fsync() in on ")


def test_a_trace_of_a_run_without_a_device_is_reported_as_one(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": 1, "dur": 2}]}')

    with pytest.raises(truth.NothingRanError, match="no operation of a device"):
        truth.of_trace(path, [])


def test_a_step_of_the_truth_is_from_one_begin_on_the_device_to_the_next():
    true = truth.Truth(0.0, 0.0, np.array([1000, 3000, 5000, 7000], np.int64))

    assert true.step_ns(4) == 2000
    assert true.step_ns(5) is None  # of one step nothing is known


def test_it_fits_on_one_screen():
    screen = text.render(explained("slow_loader"))

    assert screen.splitlines()[0] == "GPU0 (NVIDIA H200) — input-bound: input pipeline"
    assert "__getitem__" in screen
    assert "next: prepare batches ahead" in screen
    assert len(screen.splitlines()) <= 12


def test_no_path_of_a_file_is_in_it():
    for path in RUNS.glob("*.json.gz"):
        names = open_timeline([path]).names
        assert not [name for name in names if name.startswith("/") or "/home" in name]
