# SPDX-License-Identifier: Apache-2.0
"""Waits of two recordings compared: less waiting is shown beside more work, and judged when asked
for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from captures import START_NS, Writer
from sonde.cli import main as cli

PID = 42
ASK = ("ask", "[python]", "shop.py", 19, "python", "program")
THREAD = ("ThreadingMixIn.process_request_thread", "[python]", "socketserver.py", 691, "python")
ONE = ("BaseHTTPRequestHandler.handle_one_request", "[python]", "http/server.py", 408, "python")
READ = ("SocketIO.readinto", "[python]", "socket.py", 706, "python")
HZ = 99


def recorded(
    path: Path, waited_s: float, work_s: float, line: int = 19, count: int = 500, whole: bool = True
) -> str:
    """A client that asks `count` times and computes, and a server that is idle between."""
    seconds = waited_s + work_s
    writer = Writer(seconds=round(seconds) + 5, chunk_seconds=round(seconds) + 5)
    threads = [{"tid": tid, "comm": "shop"} for tid in (PID, PID + 1, PID + 2)]
    key = writer.process(PID, "shop", threads=threads)
    ask = (*ASK[:3], line, *ASK[4:])
    asking = writer.stack(ask, ("recv", "libc.so.6"))
    writer.wait(key, PID, "socket", waited_s, count=count, stack=asking)
    idle = writer.stack(THREAD, ONE, READ, ("recv", "libc.so.6"))
    writer.wait(key, PID + 1, "socket", 0.9 * seconds, count=count, stack=idle)
    writer.wait(key, PID + 2, "poll", seconds + 5, count=0)
    for number in range(round(work_s * HZ)):
        row = {"time_ns": START_NS + number, "kind": "cpu", "tid": PID, "weight_count": 1.0}
        weight = {"weight_ns": 1e9 / HZ, "stack_id": writer.stack(ask, ("sum", "python3"))}
        writer.rows["sample"].append({**key, **row, **weight})
    if whole:
        times = {"wall_ns": round(seconds * 1e9), "user_ns": round(work_s * 1e9), "system_ns": 0}
        writer.host = {"program": {**times, "peak_rss_bytes": 1 << 20, "status": 0}}
    return str(writer.write(path))


def difference(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    cli.main(["diff", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_less_waiting_is_shown_beside_more_work(tmp_path, capsys):
    a = recorded(tmp_path / "a.sonde", waited_s=20, work_s=2)
    b = recorded(tmp_path / "b.sonde", waited_s=1, work_s=5, line=31)
    found = difference(capsys, a, b)

    (wait,) = found["waits"]
    assert (wait["kind"], wait["name"]) == ("wait", "socket in ask shop.py")
    assert (wait["before_ns"], wait["after_ns"]) == (20e9, 1e9)
    assert wait["certain"]
    assert wait["weight"] == pytest.approx(-19 / 22)
    assert found["before"] == {"wall_ns": 22 * 10**9, "cpu_ns": 2 * 10**9, "blocked_ns": 20 * 10**9}
    assert found["after"]["blocked_ns"] == 10**9

    assert cli.main(["diff", a, b]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["wall", "on", "CPU", "blocked,", "all", "threads"]
    assert lines[1].split() == ["A", "22.0", "s", "2.00", "s", "20.0", "s"]
    (row,) = (line for line in lines if line.startswith("wait"))
    assert " ".join(row.split()) == "wait 20.0 s 1.00 s -95.0 % -86.4 % socket in ask shop.py"


def test_the_gate_judges_waits_only_when_asked_to(tmp_path, capsys):
    a = recorded(tmp_path / "a.sonde", waited_s=10, work_s=2)
    b = recorded(tmp_path / "b.sonde", waited_s=14, work_s=2)
    gate = ["--fail-above", "90%"]

    assert cli.main(["diff", a, b, *gate]) == 0
    assert cli.main(["diff", a, b, "--fail-above", "30%", "--waits"]) == 1
    assert "worse by 33.3 % of a run: wait socket in ask shop.py" in capsys.readouterr().out
    assert cli.main(["diff", b, a, "--fail-above", "0%", "--waits"]) == 0
    assert cli.main(["diff", a, a, "--fail-above", "0%", "--waits"]) == 0
    assert cli.main(["diff", a, b, *gate, "--waits"]) == 0


def test_few_waits_prove_nothing(tmp_path, capsys):
    a = recorded(tmp_path / "a.sonde", waited_s=10, work_s=2, count=4)
    b = recorded(tmp_path / "b.sonde", waited_s=14, work_s=2, count=5)
    (wait,) = difference(capsys, a, b)["waits"]
    assert not wait["certain"]


def test_of_several_runs_each_has_to_differ(tmp_path, capsys):
    a, b = (recorded(tmp_path / f"{s}.sonde", s, 2) for s in (10, 14))
    c, d = (recorded(tmp_path / f"{s}.sonde", s, 2) for s in (13, 17))
    overlapping = difference(capsys, a, c, "--before", b, "--after", d, "--after", d)
    (wait,) = overlapping["waits"]
    assert (wait["before_ns"], wait["after_ns"], wait["certain"]) == (12e9, 17e9, False)
    (wait,) = difference(capsys, a, b, "--after", d)["waits"]
    assert wait["certain"]
    (paired,) = difference(capsys, a, c, "--before", b, "--after", d)["waits"]
    assert paired["certain"]


def test_without_a_unit_waits_are_per_second(tmp_path, capsys):
    a = recorded(tmp_path / "a.sonde", waited_s=8, work_s=2, whole=False)
    b = recorded(tmp_path / "b.sonde", waited_s=4, work_s=6, whole=False)
    found = difference(capsys, a, b)
    (wait,) = found["waits"]
    assert found["per"] == "second"
    assert (wait["before_ns"], wait["after_ns"]) == pytest.approx((8e9 / 15, 4e9 / 15))
    assert found["before"]["cpu_ns"] == pytest.approx(2e9, rel=0.01)


def test_a_side_without_samples_has_shares_of_the_other(tmp_path, capsys):
    a = recorded(tmp_path / "a.sonde", waited_s=8, work_s=0, whole=False)
    b = recorded(tmp_path / "b.sonde", waited_s=6, work_s=2, whole=False)
    (change,) = difference(capsys, a, b)["changes"]
    assert change["relative"] is None
    assert change["weight"] == pytest.approx(1)
