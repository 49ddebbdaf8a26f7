# SPDX-License-Identifier: Apache-2.0
"""What a hostile file may cost its reader: memory within the stated limit, seconds of CPU.

Each command runs in a separate process, forked from one that has loaded the libraries; measured
is what it takes beyond that. `pytest -s` prints the table.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sonde.cli import main as cli
from sonde.export import strict_json

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from hostile_inputs import CAPTURES, FILES, TRACES, WIDE, _kernel, capture, trace  # noqa: E402

LIMIT_MB = 120
MAX_CPU_S = 5
"""Of a quiet machine."""
PART = 4
"""A fourth of what makes 25 MB, which must not cost more than ten seconds."""
FORMATS = ("table", "summary", "json", "html", "pprof", "speedscope", "folded")
RUN = """
import ctypes, json, os, re, resource, sys
import duckdb, google.protobuf, numpy, pyarrow.compute
import sonde.analyze.bound, sonde.analyze.difference, sonde.readers.kineto
import sonde.export.folded, sonde.export.html, sonde.export.json_report, sonde.export.pprof
import sonde.export.speedscope, sonde.export.summary, sonde.export.table, sonde.query.session
import sonde.export.chrome, sonde.export.perfetto
from sonde.cli import main
from machine_speed import slowness

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1000

def map_libraries():
    # A fork has no page of a file mapped; how many a touch maps, the file system decides.
    madvise = ctypes.CDLL(None).madvise
    for line in open("/proc/self/maps"):
        found = re.match("([0-9a-f]+)-([0-9a-f]+) r..p [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ [1-9]", line)
        if found:
            begin, end = (int(text, 16) for text in found.groups())
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), 22)  # MADV_POPULATE_READ
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins again

def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

slow = slowness()
for command in json.loads(sys.argv[1]):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, command
        continue
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    map_libraries()
    os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
    before, began = peak(), cpu()
    code = main.main(command)
    sys.stdout.flush()
    took = {"command": command, "code": code, "mb": peak() - before, "cpu_s": cpu() - began}
    # Once more where the limit of a quiet machine is not enough: that takes CPU time itself.
    took["slowness"] = max(slow, slowness() if took["cpu_s"] > float(sys.argv[2]) else slow)
    os.write(2, (json.dumps(took) + "\\n").encode())
    os._exit(0)
"""


def check(*commands: list[str]) -> None:
    """Run each; it may be refused, but not cost too much."""
    ran = subprocess.run(
        [sys.executable, "-P", "-c", RUN, json.dumps(commands), str(MAX_CPU_S)],
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "SONDE_READ_LIMIT": f"{LIMIT_MB}M", "PYTHONPATH": str(TESTS)},
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = [json.loads(line) for line in ran.stderr.splitlines() if line.startswith("{")]
    assert len(found) == len(commands), ran.stderr[-2000:]
    assert all(one["code"] == 0 for one in found) or "remedy: " in ran.stderr
    for one in found:
        what = f"{Path(one['command'][1]).stem:18} {' '.join(one['command'][::2]):35}"
        speed = f"machine {one['slowness']:.1f} times slower than a quiet one"
        print(f"{what} {one['mb']:5.0f} MB {one['cpu_s']:5.1f} s, exit {one['code']}, {speed}")
    for one in found:
        files = 2 if one["command"][0] == "diff" else 1  # the limit is that of one file
        assert one["mb"] <= LIMIT_MB * files, one
        assert one["cpu_s"] <= MAX_CPU_S * one["slowness"], one


@pytest.mark.parametrize("kind", CAPTURES)
def test_a_hostile_capture_costs_no_more_than_the_limit(tmp_path, kind):
    path = str(capture(tmp_path / f"{kind}.sonde", kind, CAPTURES[kind][1] // PART))
    check(
        *(["report", path, "--format", form, "-o", "/dev/stdout"] for form in FORMATS),
        ["explain", path],
        ["diff", path, path],
    )


@pytest.mark.parametrize("kind", TRACES)
def test_a_hostile_trace_costs_no_more_than_the_limit(tmp_path, kind):
    path = str(trace(tmp_path / f"{kind}.json.gz", kind, TRACES[kind][1] // PART))
    pictures = ["--perfetto", str(tmp_path / "a"), "--chrome", str(tmp_path / "b")]
    check(["explain", path], ["diff", path, path], ["explain", path, *pictures])


@pytest.mark.parametrize("kind", FILES)
def test_a_hostile_file_costs_no_more_than_the_limit_beside_its_rows(tmp_path, kind):
    write, end = FILES[kind]
    path = tmp_path / f"{kind}{end}"
    write(path)
    forms = (["report", str(path), "--format", form, "-o", "/dev/stdout"] for form in FORMATS)
    check(["explain", str(path)], *(forms if end == ".sonde" else ()))


def test_a_long_name_that_every_location_of_a_profile_has_is_made_once(tmp_path):
    profiles = pytest.importorskip("opentelemetry.proto.profiles.v1development.profiles_pb2")
    data = profiles.ProfilesData()
    table = data.dictionary
    table.string_table.extend(["", "a" * 400_000 + WIDE])
    table.function_table.add(name_strindex=1)
    profile = data.resource_profiles.add().scope_profiles.add().profiles.add()
    for number in range(20_000):
        table.location_table.add().lines.add(function_index=0)
        table.stack_table.add(location_indices=[number])
        profile.samples.add(stack_index=number, values=[1], timestamps_unix_nano=[1000 + number])
    path = tmp_path / "one_name.otlp"
    path.write_bytes(data.SerializeToString())
    check(["explain", str(path)])


def test_long_names_are_cut_and_the_report_shows_it(tmp_path, capsys):
    path = str(capture(tmp_path / "a.sonde", "ascii", 3))
    assert cli.main(["report", path]) == 0
    assert "3 × names cut: texts longer than 16,384 characters" in capsys.readouterr().out
    path = str(trace(tmp_path / "a.json.gz", "long_names", 3))
    assert cli.main(["explain", path]) == 0
    assert "names were longer" not in capsys.readouterr().out
    events = [_kernel(number, f"{number}" + "n" * 20_000) for number in range(4)]
    (tmp_path / "b.json").write_text(json.dumps({"traceEvents": events}))
    assert cli.main(["explain", str(tmp_path / "b.json")]) == 0
    assert "4 names were longer than 16,384 characters" in capsys.readouterr().out


def test_late_threads_that_are_not_looked_into_are_counted(tmp_path, capsys):
    path = str(trace(tmp_path / "a.json.gz", "threads", 1000))
    assert cli.main(["explain", path, "--json"]) == 0
    evidence = json.loads(capsys.readouterr().out)["verdicts"][0]["evidence"]
    assert any("743 more threads launched late" in line or "744 more" in line for line in evidence)


def test_slices_that_overlap_beyond_measure_are_counted_in_a_picture(tmp_path):
    path = str(trace(tmp_path / "a.json.gz", "crossing", 100))
    assert cli.main(["explain", path, "--chrome", str(tmp_path / "out.json")]) == 0
    assert "68 that overlap with all of these left out" in (tmp_path / "out.json").read_text()


def test_documents_in_pieces_are_what_json_writes_at_once():
    document = {"a": [], "b": {}, "c": [{"x": 1.5, "y": ["é\x01", None, True]}] * 700, "d": "t",
                "e": [float("nan"), float("inf"), 2]}  # fmt: skip
    for write, options in (
        (strict_json.write_indented, {"indent": 1}),
        (strict_json.write_compact, {"separators": (",", ":")}),
    ):
        out = io.BytesIO()
        write(out.write, document)
        assert out.getvalue().decode() == strict_json.dumps(document, **options)
