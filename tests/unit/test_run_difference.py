# SPDX-License-Identifier: Apache-2.0
"""Whole runs of a program compared: more work counts, noise of sampling does not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from captures import START_NS, Writer
from sonde.analyze.difference import Change, ChangeKind, Unit, regressions
from sonde.analyze.run_difference import RecordedRun, compare_runs
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
    assert inner.weight == pytest.approx(4 / 9, abs=0.01)
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

    assert all(math.isfinite(one.weight) for one in found.changes)
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
