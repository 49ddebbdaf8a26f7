# SPDX-License-Identifier: Apache-2.0
"""Names and numbers of others, in every output: shown, never obeyed."""

from __future__ import annotations

import base64
import gzip
import html.parser
import json
import re

import pytest
from test_readers_kineto import KERNEL, LAUNCH, document, written

from captures import Writer, chunk, file_header, filled, meta, scene
from sonde.cli import main as cli
from sonde.query.capture import read

ESCAPES = ["\x1b[2J", "\x1b]0;owned\x07", "\x9b31m", "\r", "\x08" * 9, "\u202e", "\u2028", "\x00"]
HOSTILE = [
    *ESCAPES,
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "a;b;c 999",
    "a\nb 12345",
    "'; DROP TABLE sample; --",
    '"},{"x":"',
    "@script@",
    "k" * 10_000,
    "</title></style></textarea><svg/onload=alert(1)>",
    "javascript:alert(1)",
    "\u2028alert(1)\u2029//",
    "=cmd|'/c calc'!A1",
    "../../../../etc/passwd",
    "]]><!--",
    "\u202e\u2066gnp.exe",
]
TEXT_FORMATS = ("table", "summary", "folded")


def hostile_capture(path, name):
    w = Writer()
    key = w.process(
        4211, name[:15], threads=[{"tid": 4211, "comm": name[:15]}], user=name, job=name
    )
    stack = w.stack("_start", (name, name, name, 3))
    w.on_cpu(key, 4211, stack, 300)
    w.wait(key, 4211, name, 3.0, count=40, stack=stack, call=name, waker=(4211, 4211))
    w.calls(key, 4211, name, count=9, seconds=0.5, op="copy", direction="h2d", stack=stack)
    w.metric(name, [1.0, 2.0])
    w.event("notice", name, 1, name)
    w.event("loss", name, 1, name)
    return w.write(path)


def unsafe(text):
    """What moves a terminal's cursor, beside line ends."""
    return [c for c in text if not c.isprintable() and c != "\n"]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("form", TEXT_FORMATS)
def test_no_name_of_a_capture_moves_the_cursor(tmp_path, name, form, capfdbinary):
    path = hostile_capture(tmp_path / "a.sonde", name)
    assert cli.main(["report", str(path), "--format", form]) == 0
    output = capfdbinary.readouterr().out.decode()
    assert not unsafe(output)
    if form == "folded":
        assert all(re.fullmatch(r".+ \d+", line) for line in output.splitlines())
        assert {line.split(" ")[-1] for line in output.splitlines()} == {"300"}


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_no_name_of_a_trace_moves_the_cursor(tmp_path, name, capsys):
    events = []
    for step in range(20):
        at = 1000.0 * step + 100
        args = {**KERNEL["args"], "correlation": step + 1}
        events.append({**KERNEL, "name": name, "ts": at, "dur": 100, "args": args})
        events.append({**LAUNCH, "ts": at - 5, "args": {"correlation": step + 1}})
        events.append(
            {"ph": "X", "cat": "python_function", "name": f"/x/{name}.py(8): {name}", "pid": 9,
             "tid": 10, "ts": at + 10, "dur": 900}
        )  # fmt: skip
    named = {"ph": "M", "name": "thread_name", "pid": 9, "tid": 10, "args": {"name": name}}
    trace = document(*events, named)
    trace["deviceProperties"][0]["name"] = name
    path = str(written(tmp_path, trace))
    assert cli.main(["explain", path, "--steps", "3"]) == 0
    assert not unsafe(capsys.readouterr().out)
    assert cli.main(["diff", path, path]) == 0
    assert not unsafe(capsys.readouterr().out)
    assert cli.main(["explain", path, "--json"]) == 0
    json.loads(capsys.readouterr().out, parse_constant=_refuse)


def _refuse(word):
    raise AssertionError(f"{word} is no JSON")


class _Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, tuple(name for name, _ in attrs)))


def tags(page):
    parser = _Tags()
    parser.feed(page)
    return parser.found


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_no_name_becomes_markup_of_a_page(tmp_path, name):
    plain, out = scene().write(tmp_path / "plain.sonde"), tmp_path / "page.html"
    assert cli.main(["report", str(plain), "--format", "html", "-o", str(out)]) == 0
    want = tags(out.read_text())
    path = hostile_capture(tmp_path / "a.sonde", name)
    assert cli.main(["report", str(path), "--format", "html", "-o", str(out)]) == 0
    page = out.read_text()
    assert tags(page) == want
    packed = max(re.findall(r"[A-Za-z0-9+/=]{200,}", page), key=len)
    trace = json.loads(gzip.decompress(base64.b64decode(packed)), parse_constant=_refuse)
    assert any(name in one for one in trace["tree"]["name"])


@pytest.mark.parametrize(
    "form", ["json", "speedscope", "html", "pprof", "table", "folded", "summary"]
)
def test_numbers_that_are_none_reach_no_output(tmp_path, form, capsys):
    """NaN, infinity and what no machine gives, in every column that holds numbers."""
    good = Writer(seconds=5)
    key = good.process(7, "p")
    good.on_cpu(key, 7, good.stack("main"), 3)
    good.metric("hw.power", [1.0])
    tables = {name: filled(name, rows) for name, rows in good.rows.items()}
    bad, at = [], {"time_ns": 500 * 10**9, **key, "tid": 7, "kind": "cpu"}
    for value in (float("nan"), float("inf"), -float("inf"), -1.0, 1e300):
        bad += [{**at, column: value} for column in ("weight_count", "weight_ns", "weight_bytes")]
    wrong = {
        "sample": filled("sample", bad),
        "metric": filled("metric", [{"series": "hw.power", "value": float("nan")}] * 2),
        "event": filled("event", [{"kind": "loss", "name": "x", "value": float("inf")}]),
        "activity": filled("activity", [{**at, "kind": "blocked", "ns": 2**64 - 1, "count": 1}]),
        "device_run": filled(
            "device_run",
            [{**key, "tid": 7, "start_time_ns": 2**64 - 2, "end_time_ns": 2**64 - 1, "weight": 1.0},
             {**key, "tid": 7, "start_time_ns": 5, "end_time_ns": 6, "weight": float("nan")}],
        ),
    }  # fmt: skip
    path, out = tmp_path / "a.sonde", tmp_path / "out"
    path.write_bytes(
        file_header() + chunk(tables, **meta(0)) + chunk(wrong, **meta(1, 505 * 10**9, last=True))
    )
    capture = read(path)
    assert capture.info.rows_refused == 15 + 2 + 1 + 1 + 2
    assert capture.tables["sample"].num_rows == 1
    assert cli.main(["report", str(path), "--format", form, "-o", str(out)]) == 0
    if form in ("json", "speedscope"):
        document = json.loads(out.read_text(), parse_constant=_refuse)
        if form == "json":
            assert {key: one[key] for one in document["losses"] for key in ("name", "amount")} == {
                "name": "rows refused",
                "amount": 21,
            }
    if form == "table":
        assert "LOST  21 × rows refused: with numbers that no recorder writes" in out.read_text()
    assert cli.main(["explain", str(path), "--json"]) == 0
    json.loads(capsys.readouterr().out, parse_constant=_refuse)


def test_an_end_before_its_start_is_an_empty_run(tmp_path):
    """A device's clock may be set between the two."""
    run = {"pid": 7, "start_ns": 1, "tid": 7, "kind": "kernel", "name": "k", "weight": 1.0}
    rows = [{**run, "start_time_ns": 501 * 10**9, "end_time_ns": 500 * 10**9}]
    path = tmp_path / "a.sonde"
    path.write_bytes(file_header() + chunk({"device_run": filled("device_run", rows)}, **meta()))
    for form in ("table", "json"):
        assert cli.main(["report", str(path), "--format", form, "-o", str(tmp_path / "out")]) == 0


def test_sums_beyond_64_bits_are_one_clear_error(tmp_path, capsys):
    rows = [
        {"time_ns": 500 * 10**9, "pid": 7, "start_ns": 1, "tid": 7, "kind": "cpu",
         "stack_id": 0, "weight_ns": 1e17, "weight_count": 1.0}
    ] * 200  # fmt: skip
    path = tmp_path / "a.sonde"
    path.write_bytes(file_header() + chunk({"sample": filled("sample", rows)}, **meta()))
    assert cli.main(["report", str(path), "--format", "folded"]) == 1
    output = capsys.readouterr().err
    assert "has impossible numbers" in output
    assert "remedy: " in output


@pytest.mark.parametrize(
    "host", [{"cpus": 10**300}, {"hz": -5}, {"cpus": True}, {"x": [[1e308]]}, {"name": "\x1b[2J"}]
)
def test_what_a_capture_has_of_its_host_is_no_trap(tmp_path, host, capsys):
    about = meta()
    about["capture"]["host"] = host
    path = tmp_path / "a.sonde"
    path.write_bytes(file_header() + chunk({"sample": filled("sample", [{"pid": 9}])}, **about))
    for form in ("table", "summary", "json", "html"):
        assert cli.main(["report", str(path), "--format", form, "-o", str(tmp_path / "o")]) == 0
        if form in TEXT_FORMATS:
            assert not unsafe((tmp_path / "o").read_text())


@pytest.mark.parametrize("labels", ["{", "[]", "7", '{"hw.id": {}}', "[" * 5000, '{"a": 1e999}'])
@pytest.mark.parametrize(
    "series", ["sonde.gpu.info", "hw.gpu.utilization", "sonde.process.gpu.memory"]
)
def test_labels_that_are_none(tmp_path, labels, series, capsys):
    rows = [
        {"time_ns": 500 * 10**9 + n, "series": series, "labels": labels, "value": 1.0}
        for n in range(3)
    ]
    path = tmp_path / "a.sonde"
    path.write_bytes(file_header() + chunk({"metric": filled("metric", rows)}, **meta()))
    assert cli.main(["report", str(path)]) == 0
    assert cli.main(["explain", str(path)]) == 0
