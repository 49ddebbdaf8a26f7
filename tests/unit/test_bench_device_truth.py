# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.device_truth`: what it takes for the truth, and how it judges."""

from __future__ import annotations

import json
import random
import tarfile

import pytest
from bench.device_truth import judge
from bench.device_truth.judge import find_share, judged, plain, steps_a_second
from bench.device_truth.loops import LOOPS
from bench.device_truth.program import measured, union_ns
from bench.device_truth.unseen_loops import UNSEEN

from captures import START_NS, Writer
from sonde.model.verdict import DeviceShare

US = 1_000
STEP_NS = 1_000 * US
STEPS = 5_000


def test_kernels_that_overlap_count_once():
    assert union_ns([(0, 10), (5, 20), (30, 40), (32, 35)]) == 30
    assert union_ns([(5, 20), (0, 30)]) == 30
    assert union_ns([]) == 0


def test_a_window_is_kernels_copies_and_sets():
    events = [
        ("gemm", 0, 100), ("gemm", 50, 150), ("mul", 200, 210),
        ("Memcpy DtoH (Device -> Pageable)", 300, 400), ("Memcpy HtoD (Pinned -> Device)", 0, 5),
        ("Memset (Device)", 500, 503),
    ]  # fmt: skip
    found = measured(events, 1_000, 2)
    assert (found["busy_ns"], found["kernels_ns"], found["count"]) == (160, 210, 3)
    assert found["kernels"] == {"gemm": 200, "mul": 10}
    assert found["copies"] == {"d2h": 100, "h2d": 5}
    assert (found["sets_ns"], found["steps"], found["busy"]) == (3, 2, 0.16)


def test_steps_are_counted_between_two_times():
    stamps = [(0, 0), (1_000_000_000, 500), (2_000_000_000, 1_500)]
    assert steps_a_second(stamps, 500_000_000, 1_500_000_000) == pytest.approx(750)
    with pytest.raises(ValueError, match="did not count"):
        steps_a_second(stamps, 1_500_000_000, 2_500_000_000)


NAMES = [
    ("void f<2, std::array<char*, 2ul> >(X)", "void f<2, std::array<char*, (unsigned long)2>>(X)"),
    ("void g<true, 64>(void const*)", "g<(bool)1, (int)64>(void const*)"),
    ("void (anonymous namespace)::h<32u>(X)", "(anonymous namespace)::h<(unsigned int)32>(X)"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "two"), NAMES)
def test_two_demanglers_name_the_same_kernel(one, two):
    assert plain(one) == plain(two)


def test_types_in_a_name_are_kept():
    assert plain("f<(int)4, long>(int)") != plain("f<(int)4, int>(int)")
    assert plain("f_2ul(long)") == "f_2ul(long)"


def share(name, kind="kernel"):
    return DeviceShare(kind, name, 0.3, 0.25, 0.35, 0.05, 0.0, 0.0, 9)


def test_a_kernel_is_found_by_its_template_where_only_one_has_it():
    one, two, three = share("f<A>(int)"), share("g<A>(int)"), share("g<B>(int)")
    found = find_share([one, two, three], "kernel", "void f<Z>(int)")
    assert found is one
    assert find_share([one, two, three], "kernel", "g<Z>(int)") is None
    assert find_share([one], "copy", "f<A>(int)") is None


@pytest.fixture
def recorded(tmp_path):
    """A folder as a run leaves it: a step has a product of 400 us and a sum of 100; what CUPTI has
    is `factor` times that."""

    def made(factor=1.0, **more):
        rng = random.Random(5)
        writer = Writer(seconds=6)
        key = writer.process(42, "loop")
        stack = writer.stack("main", "cudaDeviceSynchronize")
        calls = {"count": 100, "seconds": 5.0, "op": "sync", "api": "cuda", "stack": stack}
        writer.calls(key, 42, "cudaDeviceSynchronize", **calls)
        stride = 10
        for first in range(0, 2 * STEPS, stride):
            at = first + rng.randrange(stride)
            ns, name = [(400 * US, "gemm"), (100 * US, "sum")][at % 2]
            start = START_NS + at * STEP_NS // 2
            row = {"kind": "kernel", "name": name, "weight": stride, "source": "event", "tid": 42}
            times = {"start_time_ns": start, "end_time_ns": start + ns, "grid": "512,1,1"}
            writer.rows["device_run"].append({**key, **row, **times})
        folder = tmp_path / "runs" / "loop"
        folder.mkdir(parents=True)
        writer.write(folder / "0.sonde")
        window = {
            "window_ns": 1_300_000_000, "steps": 1_000,  # CUPTI slows it
            "busy_ns": round(factor * 500_000 * US), "kernels_ns": 500_000 * US,
            "kernels": {"gemm": round(factor * 400_000 * US), "sum": round(factor * 100_000 * US)},
            "copies": {}, "sets_ns": 0,
        }  # fmt: skip
        stamps = [(START_NS + k * 1_000 * STEP_NS, 1_000 * k) for k in range(8)]
        truth = {"loop": "loop", "windows": [window, window | more], "stamps": stamps}
        (folder / "truth.json").write_text(json.dumps(truth))
        return truth, folder

    return made


def test_a_truth_is_of_a_step_and_the_program_s_own_pace(recorded):
    truth, folder = recorded()
    found = judged(truth, folder / "0.sonde", 0)
    assert [one.quantity for one in found] == ["computing", "kernel gemm", "kernel sum"]
    assert [one.truth for one in found] == pytest.approx([0.5, 0.4, 0.1], rel=1e-6)
    assert all(one.holds for one in found)


def test_an_archive_is_judged_and_misses_are_printed(recorded, capsys):
    _, folder = recorded(factor=1.3)
    with tarfile.open(folder.parents[1] / "device-truth-00.tar", "w") as archive:
        archive.add(folder, folder.name)
    assert judge.judge_folder(folder.parents[1]) == 1
    printed = capsys.readouterr().out
    assert "miss: loop 0 computing: truth 65.00 %" in printed
    assert "all                     0 / 3" in printed


def test_what_holds_is_a_success(recorded, capsys):
    _, folder = recorded()
    assert judge.judge_folder(folder.parent) == 0
    assert "100 %" in capsys.readouterr().out


def test_loops_that_were_not_steady_are_named(recorded, capsys):
    _, folder = recorded(busy_ns=350_000 * US)
    judge.judge_folder(folder.parent)
    assert "not steady: loop 0 computing: truth 42.50 % (windows 15.00 apart)" in (
        capsys.readouterr().out
    )


def test_a_recording_without_runs_has_the_reason(recorded, capsys):
    _, folder = recorded()
    writer = Writer(seconds=6)
    writer.event("notice", "device_time_refused", 1.0, "read by another recorder")
    writer.write(folder / "0.sonde")
    assert judge.judge_folder(folder.parent) == 1
    assert "no run was timed: read by another recorder" in capsys.readouterr().out


def test_a_recording_that_is_missing_is_a_trouble(recorded, capsys):
    _, folder = recorded()
    (folder / "0.sonde").unlink()
    assert judge.judge_folder(folder.parent) == 1
    assert "loop 0: " in capsys.readouterr().out


def test_no_unseen_loop_is_one_that_the_table_was_fitted_by():
    assert len(UNSEEN) > 15
    assert not set(UNSEEN) & set(LOOPS)
