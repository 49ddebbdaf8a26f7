# SPDX-License-Identifier: Apache-2.0
"""Recordings as Python objects: tables, questions, verdict; what `import sonde` loads."""

from __future__ import annotations

import doctest
import html
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import sonde
from captures import scene
from sonde import interpreter
from sonde.errors import CaptureError, HostError, UsageError
from sonde.model.profile import ProfileKind
from sonde.recording import block as blocks
from sonde.recording import ipython
from sonde.recording.recording import FORMATS, Recording

ROOT = Path(__file__).parents[2]
H200 = ROOT / "tests/data/h200_training.sonde"


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return sonde.open(scene().write(tmp_path / "scene.sonde"))


def test_importing_sonde_loads_nothing_heavy() -> None:
    program = (
        "import sys, sonde\n"
        "heavy = {'numpy', 'pyarrow', 'duckdb', 'sonde._native', 'sonde.recording'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_answers_are_those_of_the_report(recording: Recording) -> None:
    functions = recording.functions("on-cpu", limit=2)
    assert functions == recording.functions(ProfileKind.ON_CPU, limit=0)[:2]
    assert functions[0].function == "memmove"
    assert recording.processes()[0].process.comm == "python3"
    assert recording.waits()
    assert recording.device_calls()
    assert recording.usage()[0].cpu_ns == 4_050_000_000
    assert recording.profile("off-cpu").kind == ProfileKind.OFF_CPU
    assert recording.summary() == str(recording)
    assert re.fullmatch(r"<Recording .*scene\.sonde: 10 s, [\d,]+ rows>", repr(recording))


def test_tables_are_arrow_and_sql_reads_them(recording: Recording) -> None:
    rows = recording.arrow("sample").num_rows
    (counted,) = recording.sql("SELECT count(*) AS n FROM sample WHERE weight_ns >= ?", [0])["n"]

    assert counted.as_py() == rows > 0
    assert set(recording.tables) >= {"sample", "activity", "usage"}
    with pytest.raises(UsageError, match="there is no table samples"):
        recording.arrow("samples")
    with pytest.raises(UsageError, match="there is no profile cpu-time"):
        recording.profile("cpu-time")


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_tables_for_data_frame_libraries(recording: Recording, library: str) -> None:
    pytest.importorskip(library)

    assert len(getattr(recording, library)("sample")) == recording.arrow("sample").num_rows


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_written(recording: Recording, tmp_path: Path, name: str) -> None:
    path = recording.save(tmp_path / "out", name)

    assert path.stat().st_size > 100
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="there is no format svg"):
        recording.save(tmp_path / "x", "svg")


def test_what_cannot_be_read_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"nowhere\.sonde does not exist"):
        sonde.open(tmp_path / "nowhere.sonde")


def test_a_notebook_shows_verdict_and_page_in_a_frame_of_its_own() -> None:
    shown = sonde.open(H200)._repr_html_()

    assert shown.startswith("<pre>")
    frame = re.search(r'<iframe sandbox="([^"]*)" srcdoc="([^"]*)"', shown)
    assert frame is not None
    assert frame[1] == "allow-scripts"  # and so no access to the notebook's origin
    assert "Content-Security-Policy" in html.unescape(frame[2])


def test_the_guide_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    failed, tried = doctest.testfile(str(ROOT / "docs/guide/python.md"), module_relative=False)

    assert (failed, tried) == (0, 3)


def test_a_cell_without_rights_to_record_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shell:
        magic = None

        def run_cell(self, raw_cell: str) -> object:
            raise AssertionError(raw_cell)

        def register_magic_function(self, func: object, magic_kind: str, magic_name: str) -> None:
            assert (magic_kind, magic_name) == ("cell", "sonde")
            self.magic = func

    def refused(_: object) -> None:
        raise sonde.recording.block.HostError("not here", "go elsewhere")  # type: ignore[attr-defined]

    monkeypatch.setattr(blocks.Block, "__enter__", refused)
    shell = Shell()
    ipython.register(shell)
    assert callable(shell.magic)
    with pytest.raises(Exception, match="not here"):
        shell.magic("", "1 + 1")


TALKATIVE = """
import pathlib, signal, sys, time
def end(*_):
    sys.exit("sonde: at its end")
signal.signal(signal.SIGINT, end)
print("sonde: recording", file=sys.stderr, flush=True)
time.sleep(0.1)
sys.stderr.write("a loss\\n" * 100_000)
sys.stderr.flush()
pathlib.Path(sys.argv[1]).touch()
signal.pause()
"""


def test_a_recorder_that_prints_much_does_not_wait_for_the_block_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = tmp_path / "printed"
    command = [sys.executable, "-c", TALKATIVE, str(printed)]
    monkeypatch.setattr(interpreter, "command", lambda *_: command)
    until_s = time.monotonic() + 20
    with pytest.raises(HostError, match="the recorder failed: at its end"), blocks.Block():
        while not printed.exists() and time.monotonic() < until_s:
            time.sleep(0.01)
        assert printed.exists()


# ---- with a recorder ----

BUSY = """
    import time
    def calculate(seconds):
        end = time.process_time() + seconds
        while time.process_time() < end: sum(range(500))
"""


@pytest.mark.bpf
@pytest.mark.machine
def test_a_block_is_recorded() -> None:
    namespace: dict[str, object] = {}
    exec(textwrap.dedent(BUSY), namespace)
    with sonde.record() as block:
        namespace["calculate"](0.5)  # type: ignore[operator]

    assert block.run is not None
    assert block.run.cpu_ns >= 0.5e9
    functions = {use.function: use.total_ns for use in block.recording.functions(limit=0)}
    assert functions["calculate"] > 0.3e9
    assert block.recording.info.program == block.run
    pids = {use.process.pid for use in block.recording.processes()}
    assert os.getpid() in pids


@pytest.mark.bpf
@pytest.mark.machine
def test_a_slower_test_fails_and_names_the_function(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(textwrap.dedent(BUSY))
    test = tmp_path / "test_busy.py"

    def run(seconds: float, *options: str) -> subprocess.CompletedProcess[str]:
        test.write_text(
            "import busy, pytest\n"
            "@pytest.mark.sonde(fail_above=0.5)\n"
            f"def test_it(): busy.calculate({seconds})\n"
        )
        return subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)),
                *("-p", "sonde.recording.pytest_plugin", "--rootdir", str(tmp_path), *options),
            ],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            # Installed or not: it is the module at hand that is tried.
            env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )

    baseline = ("--sonde-baseline", str(tmp_path / "perf"))
    missing = run(0.4, *baseline)
    assert missing.returncode == 1
    assert "there is no baseline" in missing.stdout
    assert run(0.4, *baseline, "--sonde-update").returncode == 0
    assert run(0.4, *baseline).returncode == 0
    slower = run(1.5, *baseline)
    assert slower.returncode == 1
    assert "CPU time grew by" in slower.stdout
    assert "calculate" in slower.stdout
    assert run(1.5).returncode == 0  # without the option it is a test like any other
