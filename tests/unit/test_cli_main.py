# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole: help, versions, and what a person sees when something goes wrong."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import sonde
from sonde.cli import main as cli
from sonde.errors import HostError, SondeError, UsageError


def sonde_command(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sonde", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environ,
    )


def run_as(command: Callable[[argparse.Namespace], int], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of `main` when its command is `command`."""
    parser = argparse.ArgumentParser()
    parser.set_defaults(run=command, command="test")
    monkeypatch.setattr(cli, "build_parser", lambda: parser)
    return cli.main([])


def test_commands_import_no_pandas(tmp_path: Path) -> None:
    """Arrow would, where it is installed: half a second for each command."""
    (tmp_path / "pandas").mkdir()
    (tmp_path / "pandas" / "__init__.py").write_text("raise SystemExit('pandas was imported')")
    capture = Path(__file__).parents[1] / "data" / "h200_input_pipeline.sonde"
    for command in (
        ["report", "--format", "summary"],
        ["report", "--format", "json"],
        ["explain"],
        ["diff", str(capture)],
    ):
        done = sonde_command(*command, str(capture), PYTHONPATH=str(tmp_path))

        assert (done.returncode, done.stderr) == (0, "")
    # ... which the test would notice:
    code = "import pyarrow; pyarrow.array([1]).to_pandas()"
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert "pandas was imported" in done.stderr


def test_version() -> None:
    done = sonde_command("--version")

    assert (done.returncode, done.stdout) == (0, f"sonde {sonde.__version__}\n")


@pytest.mark.parametrize("name", [[], *([command] for command in cli.COMMANDS)])
def test_every_help_has_an_example(name: list[str]) -> None:
    done = sonde_command(*name, "--help")

    assert done.returncode == 0
    assert "example" in done.stdout
    assert "sonde " in done.stdout.partition("example")[2]


def test_the_outline_has_the_words_of_the_commands() -> None:
    assert cli.build_outline().format_help() == cli.build_parser().format_help()


def test_help_comes_at_once() -> None:
    times_s = []
    for _ in range(5):
        began = time.perf_counter()
        sonde_command("--help")
        times_s.append(time.perf_counter() - began)

    bare_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"])
    bare_s = time.perf_counter() - bare_s

    assert min(times_s) < max(0.1, 5 * bare_s)


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["doctor", "--no-such-flag"]])
def test_wrong_use_exits_with_2(arguments: list[str]) -> None:
    done = sonde_command(*arguments)

    assert done.returncode == 2
    assert "usage: sonde" in done.stdout + done.stderr


@pytest.mark.parametrize(("error", "code"), [(SondeError, 1), (UsageError, 2), (HostError, 3)])
def test_a_deliberate_error_is_two_lines(
    error: type[SondeError],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def command(args: argparse.Namespace) -> int:
        raise error("the thing is broken", "Fix the thing.")

    assert run_as(command, monkeypatch) == code
    assert capsys.readouterr().err == "sonde: the thing is broken\n  remedy: Fix the thing.\n"


def test_an_unexpected_exception_is_reported_as_a_bug_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(args: argparse.Namespace) -> int:
        raise ZeroDivisionError("division by zero")

    assert run_as(command, monkeypatch) == 1
    message = capsys.readouterr().err
    assert "a bug in Sonde" in message
    assert "SONDE_DEBUG=1" in message
    assert "Traceback" not in message

    monkeypatch.setenv("SONDE_DEBUG", "1")
    run_as(command, monkeypatch)
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    assert run_as(command, monkeypatch) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_exits_is_no_bug() -> None:
    line = f"{sys.executable} -m sonde doctor --json | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)

    assert done.stderr == ""
    assert done.stdout.splitlines()[0] == "{"


def test_a_library_that_the_host_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(argv: object) -> int:
        raise ImportError(
            "libstdc++.so.6: cannot open shared object file: No such file or directory"
        )

    monkeypatch.setattr(cli, "_dispatch", run)

    assert cli.main(["report", "x.sonde"]) == 3
    message = capsys.readouterr().err
    assert "the library libstdc++.so.6 is missing on this host" in message
    assert "libstdc++6 (apt)" in message


@pytest.mark.parametrize(
    "arguments",
    [["trace", str(os.getpid())], ["explain", "--pid", "1"], ["diff", "a.sonde", "b.sonde"]],
    ids=lambda given: given[0],
)
def test_an_installation_for_recording_names_what_reading_needs(arguments: list[str]) -> None:
    code = (
        "import sys; sys.modules.update(numpy=None, pyarrow=None, duckdb=None);"
        "from sonde.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )

    assert done.returncode == 3
    assert "the Python package numpy is not installed" in done.stderr
    assert "pip install sonde" in done.stderr
