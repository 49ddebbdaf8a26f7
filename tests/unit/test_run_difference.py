# SPDX-License-Identifier: Apache-2.0
"""Whole runs of a program compared: more work counts, noise of sampling does not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from captures import START_NS, Writer
from sonde.analyze.difference import Change, ChangeKind, Difference, Unit, regressions
from sonde.analyze.run_difference import RecordedRun, are_pairs, compare_runs
from sonde.cli import main as cli
from sonde.model.answers import FunctionUse
from sonde.model.program_run import ProgramRun
from sonde.query.capture import read

HZ = 99


def run(wall_s: float, inner_s: float, outer_s: float = 1.0) -> RecordedRun:
    """A program whose `outer` calls `inner`, sampled at 99 Hz without any luck."""

    def use(name: str, own_s: float, all_s: float) -> FunctionUse:
        own, every = round(own_s * HZ), round(all_s * HZ)
        return FunctionUse(
            name, "app", "", own, own * 10**9 // HZ, 0, every, every * 10**9 // HZ, 0
        )

    cpu_ns = round((inner_s + outer_s) * 1e9)
    functions = [use("outer", outer_s, outer_s + inner_s), use("inner", inner_s, inner_s)]
    return RecordedRun(ProgramRun(round(wall_s * 1e9), cpu_ns, 0, 1 << 20, 0), functions)


def named(changes: tuple[Change, ...], kind: ChangeKind, name: str) -> Change:
    (found,) = (one for one in changes if (one.kind, one.name) == (kind, name))
    return found


def test_an_inner_loop_that_does_half_as_much_again_is_named() -> None:
    found = compare_runs([run(10, 8)], [run(14, 12)])

    assert found.per == Unit.RUN
    assert [one.name for one in found.changes[:2]] == ["wall time", "CPU time"]
    assert named(found.changes, ChangeKind.RUN, "CPU time").relative == pytest.approx(4 / 9)
    inner = named(found.changes, ChangeKind.FUNCTION, "inner")
    assert inner.certain
    assert inner.cost == pytest.approx(4 / 9, abs=0.01)
    assert not named(found.changes, ChangeKind.FUNCTION, "outer").certain
    assert named(found.changes, ChangeKind.INCLUSIVE, "outer").certain
    failed = {(one.kind, one.name) for one in regressions(found, 0.03)}
    assert (ChangeKind.FUNCTION, "inner") in failed
    assert (ChangeKind.FUNCTION, "outer") not in failed


def test_more_of_everything_is_worse_though_shares_stay_the_same() -> None:
    found = compare_runs([run(10, 8, 2)], [run(15, 12, 3)])

    assert named(found.changes, ChangeKind.RUN, "wall time").relative == pytest.approx(0.5)
    assert regressions(found, 0.4)


def test_few_samples_prove_nothing_about_functions() -> None:
    found = compare_runs([run(0.3, 0.2, 0.1)], [run(0.34, 0.24, 0.1)])

    assert not named(found.changes, ChangeKind.FUNCTION, "inner").certain


def test_runs_that_overlap_are_not_distinguished() -> None:
    before = [run(10, 8), run(12, 10), run(11, 9)]
    after = [run(11.5, 9.5), run(13, 11), run(12.5, 10.5)]
    overlapping = compare_runs(before, after)
    assert not any(one.certain for one in overlapping.changes)

    slower = compare_runs(before, [run(14, 12), run(15, 13), run(14.5, 12.5)])
    wall = named(slower.changes, ChangeKind.RUN, "wall time")
    assert wall.certain
    assert wall.relative == pytest.approx(14.5 / 11 - 1)


def test_a_program_that_used_no_cpu_at_all() -> None:
    idle = RecordedRun(ProgramRun(0, 0, 0, 0, 0), [])
    found = compare_runs([idle], [idle])

    assert all(math.isfinite(one.cost) for one in found.changes)
    assert regressions(found, 0) == []


# ---- with files ----


def capture(path: Path, inner: int, outer: int, program: dict[str, int] | None) -> str:
    """`inner` and `outer`: samples in each function."""
    writer = Writer(seconds=12)
    key = writer.process(42, "job")
    for number in range(inner + outer):
        stack = writer.stack("main", "inner") if number < inner else writer.stack("main")
        at = {"time_ns": START_NS + number % 10 * 10**9, "kind": "cpu", "tid": 42}
        weight = {"weight_count": 1.0, "weight_ns": 1e9 / HZ, "stack_id": stack}
        writer.rows["sample"].append({**key, **at, **weight})
    writer.host = {"program": program} if program is not None else {}
    return str(writer.write(path))


def of(cpu_ns: int) -> dict[str, int]:
    times = {"wall_ns": cpu_ns + 10**9, "user_ns": cpu_ns, "system_ns": 0}
    return {**times, "peak_rss_bytes": 1 << 20, "status": 0}


def test_files_of_whole_runs_are_compared_by_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = capture(tmp_path / "a.sonde", 800, 200, of(10 * 10**9))
    b = capture(tmp_path / "b.sonde", 1200, 200, of(14 * 10**9))

    assert cli.main(["diff", a, b, "--fail-above", "3%", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["per"] == "run"
    failed = {(one["kind"], one["name"]) for one in result["failed"]}
    assert failed >= {("run", "CPU time"), ("run", "wall time"), ("function", "inner")}
    assert cli.main(["diff", a, a, "--fail-above", "0%"]) == 0
    assert cli.main(["diff", a, b, "--before", a, "--before", a, "--after", b]) == 0


def test_where_nothing_shows_how_much_was_done_the_gate_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = capture(tmp_path / "a.sonde", 80, 20, of(10**9))
    part = capture(tmp_path / "b.sonde", 80, 20, None)

    assert cli.main(["diff", whole, part, "--fail-above", "3%"]) == 2
    assert "how much work was done" in capsys.readouterr().err
    assert cli.main(["diff", whole, part]) == 0
    assert cli.main(["diff", whole, part, "--before", whole]) == 2


@pytest.mark.parametrize("wrong", [{"wall_ns": -1}, {"status": 1 << 40}, {"user_ns": "much"}])
def test_impossible_figures_of_a_run_are_no_run(tmp_path: Path, wrong: dict[str, object]) -> None:
    path = capture(tmp_path / "a.sonde", 8, 2, of(10**9) | wrong)  # type: ignore[arg-type]

    assert read(Path(path)).info.program is None


def beside(one: RecordedRun, began_s: float, clock_ns: int = 0) -> RecordedRun:
    """A run that began then."""
    start_ns = round(began_s * 1e9)
    return replace(one, start_ns=start_ns, end_ns=start_ns + one.program.wall_ns, clock_ns=clock_ns)


def duet(change: float, noise: tuple[float, ...], apart_s: float = 0.0) -> Difference:
    """Pairs of runs on a machine whose speed differs from pair to pair by `noise`."""
    pairs = [
        (run(12, 10 * slow), run(12, (10 + 11 * change) * slow + 0.02 * (-1) ** number))
        for number, slow in enumerate(noise)
    ]
    before = [beside(one, 100.0 * number) for number, (one, _) in enumerate(pairs)]
    after = [beside(one, 100.0 * number + apart_s) for number, (_, one) in enumerate(pairs)]
    return compare_runs(before, after)


NOISE = (1.0, 1.3, 0.9, 1.2, 1.05)


def test_runs_of_the_same_time_show_what_noise_would_hide() -> None:
    together = named(duet(0.03, NOISE).changes, ChangeKind.RUN, "CPU time")

    assert together.certain
    assert together.cost == pytest.approx(0.03, abs=0.005)
    one_by_one = named(duet(0.03, NOISE, apart_s=50).changes, ChangeKind.RUN, "CPU time")
    assert not one_by_one.certain


def test_runs_of_the_same_time_without_a_change_are_the_same() -> None:
    found = duet(0.0, NOISE)

    assert not any(one.certain for one in found.changes)
    assert regressions(found, 0.001) == []


def test_clocks_of_two_machines_make_no_pairs() -> None:
    one = beside(run(12, 10), 0)

    assert are_pairs([one, one], [one, one])
    other = beside(run(12, 10), 0, clock_ns=60 * 10**9)
    assert not are_pairs([one, one], [other, other])
    assert not are_pairs([one], [one])


def renamed(name: str, inner_s: float) -> RecordedRun:
    """A program whose work is in a function of this name."""
    one = run(12, inner_s)
    functions = [replace(use, function=name) for use in one.functions if use.function == "inner"]
    return replace(one, functions=functions)


def test_a_new_name_for_old_code_is_not_worse() -> None:
    before = [renamed("work", 10 + change) for change in (0.0, 0.1, 0.2)]
    after = [renamed("work_all", 10 + change) for change in (0.05, 0.15, 0.25)]
    assert regressions(compare_runs(before, after), 0.02) == []

    more = [renamed("work_all", 15 + change) for change in (0.05, 0.15, 0.25)]
    assert {one.name for one in regressions(compare_runs(before, more), 0.02)} == {"CPU time"}
