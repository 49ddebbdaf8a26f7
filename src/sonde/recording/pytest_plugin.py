# SPDX-License-Identifier: Apache-2.0
"""pytest plugin: records tests that are marked `sonde`, and fails those that became slower.

`@pytest.mark.sonde(fail_above=0.2)` compares the CPU time of the test with that of a baseline in
the folder `--sonde-baseline DIR`; with `--sonde-update` it records that baseline. Without the
options marked tests run as any other. A failure names the functions whose CPU time grew most. The
baseline's file is called after the test's node id, with - for other characters than letters,
digits, . and _: ids that differ in those alone share a baseline.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sonde.model.program_run import ProgramRun
from sonde.private_files import replacing

if TYPE_CHECKING:
    from sonde.analyze.difference import Difference
    from sonde.recording.recording import Recording

ALLOWED = 0.2
"""Default of `fail_above`: CPU time may grow by this share."""
_NAMED = 5
"""Functions that a failure names."""
_MOST = 0.5
"""A function is named if it, with what it called, took more than this share of the growth, and by
itself more than `fail_above` allows the whole: so a test may fail without a name."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("sonde", "recording tests with Sonde")
    group.addoption("--sonde-baseline", metavar="DIR", type=Path, help="where baselines lie")
    group.addoption("--sonde-update", action="store_true", help="record the baselines")


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line(
        "markers", "sonde(fail_above=0.2): record the test; fail where its CPU time grew by more"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Record a marked test while it runs."""
    mark = item.get_closest_marker("sonde")
    folder: Path | None = item.config.getoption("--sonde-baseline")
    if mark is None or folder is None:
        return (yield)
    from sonde.recording.block import Block

    update = item.config.getoption("--sonde-update")
    baseline = folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', item.nodeid)}.sonde"
    if update:
        folder.mkdir(parents=True, exist_ok=True)
    elif not baseline.exists():
        pytest.fail(
            f"there is no baseline {baseline}; record it with --sonde-update", pytrace=False
        )
    block = Block(baseline if update else None)
    with block:
        result = yield
    assert block.run is not None
    if update:
        with replacing(_run_file(baseline)) as out:
            out.write(json.dumps(dataclasses.asdict(block.run)).encode())
        return result
    found = _difference(baseline, block.recording, block.run)
    above = float(mark.kwargs.get("fail_above", ALLOWED))
    if failure := _failure(found, above, _heights(block.recording)):
        pytest.fail("\n".join(failure), pytrace=False)
    return result


def _run_file(baseline: Path) -> Path:
    return baseline.with_suffix(".json")


def _difference(baseline: Path, recording: Recording, run: ProgramRun) -> Difference:
    from sonde.analyze.run_difference import RecordedRun, compare_runs
    from sonde.recording.recording import Recording

    before = ProgramRun(**json.loads(_run_file(baseline).read_text()))
    functions = Recording(baseline).functions(limit=0)
    return compare_runs(
        [RecordedRun(before, functions)], [RecordedRun(run, recording.functions(limit=0))]
    )


def _heights(recording: Recording) -> dict[str, float]:
    """For each Python function its mean distance from the innermost frame of its stacks."""
    found: dict[str, list[int]] = {}
    profile = recording.profile()
    for number in set(profile.row_stack):
        frames = [frame for frame in profile.stacks[number] if frame.kind == "python"]
        for height, frame in enumerate(frames):
            found.setdefault(frame.function, []).append(height)
    return {name: sum(heights) / len(heights) for name, heights in found.items()}


def _failure(found: Difference, above: float, heights: Mapping[str, float]) -> Sequence[str]:
    """Lines for a test whose CPU time grew by more than `above`; none for any other."""
    from sonde.analyze.difference import ChangeKind, regressions
    from sonde.analyze.run_difference import CPU_TIME

    worse = regressions(found, above)
    cpu = next((one for one in worse if one.kind == ChangeKind.RUN and one.name == CPU_TIME), None)
    if cpu is None:
        return ()
    lines = [f"CPU time grew by {cpu.relative:.0%}, more than {above:.0%}:"]
    # Python functions that hold most of the growth, innermost first: callers hold it, too.
    functions = sorted(
        (
            change
            for change in worse
            if change.kind == ChangeKind.INCLUSIVE
            and change.name in heights
            and change.after - change.before > _MOST * (cpu.after - cpu.before)
        ),
        key=lambda change: heights[change.name],
    )[:_NAMED]
    lines += [
        f"  {change.before / 1e9:.3f} s -> {change.after / 1e9:.3f} s  {change.name}"
        for change in functions
    ]
    return lines
