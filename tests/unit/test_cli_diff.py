# SPDX-License-Identifier: Apache-2.0
"""What changed between two records, and when that fails a build."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from captures import START_NS, Writer
from sonde.cli import main as cli

RUNS = Path(__file__).parents[1] / "data" / "explain"


def trace(path: Path, norm_us: float, seed: int, steps: int = 60, gap_us: float = 0) -> str:
    """A loop of two kernels and a wait, the second kernel as long as asked for."""
    rng = random.Random(seed)
    events = []
    at, number = 1000.0, 0
    for _ in range(steps):
        for name, length in (("gemm", 500.0), ("norm", norm_us)):
            number += 1
            length *= rng.uniform(0.98, 1.02)
            device = {"device": 0, "stream": 7, "correlation": number}
            events.append({"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7,
                           "ts": at, "dur": length, "args": device})  # fmt: skip
            events.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9,
                           "tid": 9, "ts": at - 300, "dur": 3,
                           "args": {"correlation": number}})  # fmt: skip
            at += length + 1
        at += gap_us
    path.write_text(json.dumps({"traceEvents": events}))
    return str(path)


def test_the_same_work_twice_is_within_noise(tmp_path, capsys):
    a, b = trace(tmp_path / "a", 200, 1), trace(tmp_path / "b", 200, 2)

    assert cli.main(["diff", a, b, "--fail-above", "3%"]) == 0
    output = capsys.readouterr().out
    assert "nothing got worse by more than 3 %" in output
    assert "step" in output.splitlines()[1]


def test_a_slower_kernel_fails_and_is_named(tmp_path, capsys):
    a, b = trace(tmp_path / "a", 200, 1), trace(tmp_path / "b", 240, 2)

    assert cli.main(["diff", a, b, "--fail-above", "3%"]) == 1
    output = capsys.readouterr().out
    assert "worse by 5.7 % of a step: kernel norm" in output
    assert "kernel gemm" not in output.split("worse by", 1)[1]
    assert cli.main(["diff", a, b, "--fail-above", "10%"]) == 0
    assert cli.main(["diff", a, b]) == 0
    assert cli.main(["diff", b, a, "--fail-above", "3%"]) == 0


def test_for_scripts(tmp_path, capsys):
    a, b = trace(tmp_path / "a", 200, 1), trace(tmp_path / "b", 240, 2, gap_us=300)

    assert cli.main(["diff", a, b, "--json", "--fail-above", "0.03"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["per"] == "step"
    kinds = {(one["kind"], one["name"]) for one in result["failed"]}
    assert ("step", "step time") in kinds
    assert ("kernel", "norm") in kinds
    assert result["changes"][0]["kind"] == "step"


def test_recorded_programs_with_and_against_themselves(capsys):
    slow, fast = str(RUNS / "slow_loader.json.gz"), str(RUNS / "host_python.json.gz")

    assert cli.main(["diff", slow, slow, "--fail-above", "0%"]) == 0
    assert cli.main(["diff", slow, fast]) == 0
    assert "input pipeline" in capsys.readouterr().out


@pytest.mark.parametrize("share", ["much", "-3%", "nan"])
def test_a_share_that_is_none(share, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["diff", "a", "b", "--fail-above", share])
    assert ended.value.code == 2


def capture(path: Path, seed: int, step_ms: float) -> str:
    """A program whose waits for the device are counted, after two seconds of start-up."""
    rng = random.Random(seed)
    writer = Writer(seconds=12)
    key = writer.process(42, "train")
    count = 0
    t = 2000.0
    while t < 12_000:
        at = START_NS + round(t * 1e6)
        row = {"start_time_ns": at, "end_time_ns": at + 1000, "kind": "device", "op": "sync"}
        writer.rows["span"].append({**key, **row, "name": "clFinish", "tid": 42})
        count += 1
        t += step_ms * rng.uniform(0.9, 1.1)
    total = {"time_ns": START_NS, "kind": "device", "name": "clFinish", "op": "sync", "tid": 42}
    writer.rows["activity"].append({**key, **total, "ns": count * 1000, "count": count})
    return str(writer.write(path))


def test_where_calls_are_only_counted_their_rate_decides(tmp_path, capsys):
    a = capture(tmp_path / "a.sonde", 1, 10)
    same, slow = capture(tmp_path / "b.sonde", 2, 10), capture(tmp_path / "c.sonde", 3, 14)

    assert cli.main(["diff", a, same, "--fail-above", "3%"]) == 0
    assert cli.main(["diff", a, slow, "--fail-above", "3%"]) == 1
    assert "of a call: step from one clFinish to the next" in capsys.readouterr().out


def captured(path: Path, seconds: float = 5, name: str = "shop", whole: bool = False) -> str:
    writer = Writer(seconds=seconds, chunk_seconds=seconds, host={"whole_machine": whole})
    key = writer.process(42, name)
    writer.on_cpu(key, 42, writer.stack("main"), round(90 * seconds))
    return str(writer.write(path))


def test_records_of_other_scope_are_compared_with_a_warning(tmp_path, capsys):
    some, every = captured(tmp_path / "a.sonde"), captured(tmp_path / "b.sonde", whole=True)

    assert cli.main(["diff", some, every]) == 0
    assert (
        "note: A is a record of chosen processes, B of the whole machine" in capsys.readouterr().out
    )
    assert cli.main(["diff", some, every, "--fail-above", "3%"]) == 2
    assert "A is a record of chosen processes" in capsys.readouterr().err
    assert cli.main(["diff", some, some, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == []


def test_records_without_a_common_process_or_of_other_length_are_noted(tmp_path, capsys):
    one = captured(tmp_path / "a.sonde")
    other = captured(tmp_path / "b.sonde", seconds=12, name="batch")

    assert cli.main(["diff", one, other]) == 0
    output = capsys.readouterr().out
    assert "note: no process of A (shop) is in B (batch)" in output
    assert "note: one record is 2.4 times as long as the other" in output
