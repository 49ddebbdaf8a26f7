# SPDX-License-Identifier: Apache-2.0
"""`sonde report`: formats, filters, where output goes, and one clear line on bad input."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from captures import file_header, scene
from sonde.cli.main import main


@pytest.fixture
def capture(tmp_path):
    return scene().write(tmp_path / "run.sonde")


@pytest.fixture
def report(capture, capfd):
    """Run the command; gives exit code, standard output and standard error."""

    def report(*arguments, file=capture):
        try:
            code = main(["report", str(file), *map(str, arguments)])
        except SystemExit as ended:
            code = ended.code
        out, err = capfd.readouterr()
        return code, out, err

    return report


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("table", ""),
        ("summary", "Whole machine, 10.0 s"),
        ("folded", "python3;_start;main"),
        ("json", "{\n"),
    ],
)
def test_text_goes_to_standard_output(report, name, begin):
    code, out, err = report("--format", name)
    assert (code, err) == (0, "")
    assert out.startswith(begin)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("html", "html is for other programs"),
        ("speedscope", "speedscope is for other programs"),
        ("pprof", "a pprof profile is binary"),
    ],
)
def test_what_nobody_reads_in_a_terminal_is_not_written_to_one(report, monkeypatch, name, why):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    code, out, err = report("--format", name, "-o", "-")
    assert (code, out) == (2, "")
    assert f"{why}: not for a terminal" in err


@pytest.mark.parametrize(
    ("name", "suffix", "begin"),
    [
        ("html", ".html", b"<!doctype html>"),
        ("flamegraph", ".html", b"<!doctype html>"),
        ("pprof", ".pb.gz", b"\x1f\x8b"),
        ("speedscope", ".speedscope.json", b'{"$schema"'),
    ],
)
def test_the_rest_goes_to_a_file_beside_the_capture_or_to_who_reads(
    capture, tmp_path_factory, name, suffix, begin
):
    """Beside it where nobody reads standard output; a pipe or a file there gets it."""
    command = [sys.executable, "-m", "sonde", "report", str(capture), "--format", name]
    piped = subprocess.run(command, capture_output=True)
    assert (piped.returncode, piped.stderr) == (0, b"")
    assert piped.stdout.startswith(begin)
    redirected = tmp_path_factory.mktemp("elsewhere") / "out"
    with redirected.open("wb") as out:
        assert subprocess.run(command, stdout=out).returncode == 0
    assert redirected.read_bytes().startswith(begin)
    assert [p.name for p in capture.parent.iterdir()] == ["run.sonde"]

    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    path = capture.with_suffix(suffix)
    assert (done.returncode, done.stderr) == (0, f"{path}\n")
    assert path.read_bytes().startswith(begin)
    assert [p.name for p in sorted(capture.parent.iterdir())] == sorted([path.name, "run.sonde"])


def test_output_goes_where_the_flag_names(report, tmp_path):
    assert report("-o", tmp_path / "t.txt")[0] == 0
    assert "OFF-CPU" in (tmp_path / "t.txt").read_text()
    assert report("--format", "pprof", "-o", tmp_path / "p")[0] == 0
    assert gzip.decompress((tmp_path / "p").read_bytes())
    assert report("--format", "speedscope", "-o", "-")[1].startswith("{")


def test_single_waits_are_read_for_their_lengths(report, tmp_path):
    writer = scene()
    key = {"pid": 4211, "start_ns": 4211 * 10_000_000}
    writer.single_waits(key, 4211, "futex", [10.0, 10.0, 12.0, 14.0, 14.0] * 64)
    path = writer.write(tmp_path / "single.sonde")
    found = json.loads(report("--format", "json", file=path)[1])["waits"]
    (wait,) = (one for one in found if one["single_count"])
    assert (wait["reason"], wait["kind"], wait["single_count"]) == ("futex", "off-cpu", 320)
    lengths = [wait[f"single_{name}_ns"] / 1e6 for name in ("p10", "p50", "p90")]
    assert lengths == [10, 12, 14]
    assert wait["single_ns"] == 3_840_000_000
    assert "320 × 12.0 ms (10.0–14.0 ms)\n" in report("--format", "summary", file=path)[1]
    late = report("--format", "json", "--from", "2", file=path)[1]
    assert not [one for one in json.loads(late)["waits"] if one["single_count"]]


def test_metric_and_pid_choose(report):
    _, out, _ = report("--format", "folded", "--metric", "run-queue", "--pid", "5000")
    assert out == "cc1 <\"&'>;_start;(preempted) 3000000\n"


@pytest.mark.parametrize(
    ("former", "name"),
    [("cpu", "on-cpu"), ("offcpu", "off-cpu"), ("runqueue", "run-queue"),
     ("device", "gpu-time"), ("device-calls", "gpu-calls"), ("held", "memory-held")],
)  # fmt: skip
def test_former_names_of_metrics_are_accepted_but_not_shown(report, former, name):
    arguments = ("--format", "folded", "--metric")
    assert report(*arguments, former) == report(*arguments, name)
    help_words = report("--help")[1].replace(",", " ").replace("{", " ").split()
    assert name in help_words
    assert former not in ("offcpu", "runqueue", "device-calls") or former not in help_words


@pytest.mark.parametrize(
    ("hide", "stack"),
    [
        ("kernel", "_start;main;train_step;pthread_cond_wait;(futex) 4000000"),
        ("runtime", "_start;train_step;(futex) 4000000"),
        ("native", "[hidden];(futex) 4000000"),
    ],
)
def test_frames_are_left_out(report, hide, stack):
    _, out, err = report("--format", "folded", "--metric", "off-cpu", "--hide", hide)
    assert err == ""
    assert f"python3;{stack}" in out.splitlines()


def test_a_summary_has_no_stacks_to_leave_frames_out_of(report):
    code, out, err = report("--format", "summary", "--hide", "kernel")
    assert (code, out) == (2, "")
    assert "leave it out, or choose another format: --format table" in err


def test_a_range_of_seconds_chooses(report):
    assert len(json.loads(report("--format", "json", "--to", "1")[1])["processes"]) == 4
    assert json.loads(report("--format", "json", "--from", "1")[1])["processes"] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--format", "pdf"],
        ["--metric", "moon"],
        ["--pid", "x"],
        ["--pid", "-1"],
        ["--pid", "4211", "--pid", "99999"],
        ["--from", "nan"],
        ["--from", "11"],
        ["--from", "3", "--to", "3"],
        ["--limit", "5", "--format", "json"],
        ["--limit", "many"],
        ["--hide", "python"],
    ],
    ids=" ".join,
)
def test_wrong_use_is_exit_code_2(report, arguments):
    code, out, err = report(*arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert err


def test_the_capture_itself_is_never_overwritten(report, capture):
    before = capture.read_bytes()
    assert report("--format", "html", "-o", capture)[0] == 2
    assert capture.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b"GIF89a" * 9, "is no Sonde capture"),
        (file_header(), "no readable chunk"),
        (file_header(version=9), "format 9"),
    ],
    ids=["missing", "empty", "foreign", "header", "newer"],
)
def test_a_bad_capture_is_one_line_with_a_remedy(report, tmp_path, content, words):
    path = tmp_path / "bad.sonde"
    if content is not None:
        path.write_bytes(content)
    code, out, err = report("--format", "html", file=path)
    assert (code, out) == (1, "")
    cause, remedy = err.splitlines()
    assert words in cause
    assert "remedy: " in remedy
    assert not path.with_suffix(".html").exists()


def test_a_damaged_capture_is_reported_with_its_loss(report, capture):
    capture.write_bytes(capture.read_bytes()[:-10])
    code, out, _ = report("--format", "summary")
    assert code == 0
    assert "LOST" in out
    assert "unfinished chunk" in out


@pytest.mark.parametrize("where", ["/dev/full", "/none/out.html", "/proc/out.html"])
def test_output_that_cannot_be_written(report, where):
    code, _, err = report("--format", "html", "-o", where)
    assert code == 1
    assert err.startswith(f"sonde: cannot write {where}")
    assert "remedy:" in err


def test_an_output_that_fails_leaves_what_was_there(report, tmp_path, monkeypatch):
    from sonde.export import folded

    target = tmp_path / "old.txt"
    target.write_text("old")

    def broken(session, out, **_):
        out.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folded, "write", broken)
    code, _, err = report("--format", "folded", "-o", target)
    assert code == 1
    assert "No space left" in err
    assert target.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["old.txt", "run.sonde"]


def test_a_reader_that_goes_away_is_no_error(capture):
    command = [sys.executable, "-m", "sonde", "report", str(capture), "--format", "json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=30) == 0


def test_help_shows_every_format_and_an_example(report):
    code, out, _ = report("--help")
    assert code == 0
    assert "sonde report run.sonde --format flamegraph" in out
    for name in ("table", "summary", "html", "pprof", "folded", "speedscope", "json"):
        assert f"\n  {name} " in out


def test_the_command_line_starts_without_the_engine():
    check = "import sys, sonde.cli.report; print({'pyarrow', 'duckdb'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.stdout.strip() == "set()"


def test_nothing_is_left_in_the_working_folder(capture, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    command = [sys.executable, "-m", "sonde", "report", str(capture)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    assert list(Path(folder).iterdir()) == []


@pytest.mark.parametrize("name", ["table", "html", "pprof", "folded", "speedscope", "json"])
def test_a_recording_comes_through_a_pipe_and_its_report_leaves_through_one(capture, name):
    command = [sys.executable, "-m", "sonde", "report", "-", "--format", name]
    done = subprocess.run(command, input=capture.read_bytes(), capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(done.stdout) > 100
    assert [path.name for path in capture.parent.iterdir()] == [capture.name]


def test_a_pipe_without_end_is_given_up(capture, monkeypatch):
    monkeypatch.setenv("SONDE_READ_LIMIT", "3M")
    command = [sys.executable, "-m", "sonde", "report", "-"]
    with Path("/dev/zero").open("rb") as zero:
        endless = subprocess.Popen(["cat"], stdin=zero, stdout=subprocess.PIPE)
        done = subprocess.run(command, stdin=endless.stdout, capture_output=True, text=True)
        endless.stdout.close()
        endless.wait()
    assert done.returncode == 1
    assert "more than 0.003 GB came through" in done.stderr
