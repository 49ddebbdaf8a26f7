# SPDX-License-Identifier: Apache-2.0
"""Each tutorial is run: its programs are started, its commands print what the page shows.

Programs are the blocks of Python with a file's name in their first line; commands those of
`console`.
Numbers differ from run to run; names, functions, files and lines do not.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
PAGES = sorted(TUTORIALS.glob("*.md"))
_BLOCK = re.compile(r"```(python|console)\n(.*?)```", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.:])[\d,]+(?:\.\d+)?")
_UNIT = re.compile(r"\b(?:ns|µs|ms|s|kB|MB|GB)\b")
COMMAND_S = 120.0

pytestmark = pytest.mark.bpf


def pattern_of(line: str) -> re.Pattern[str]:
    """A line of a page: any numbers, units and spaces, and what columns of other widths cut."""
    parts = []
    for word in line.split():
        place = re.fullmatch(r"(.+\.py:)(\d+)", word)
        kept, cut, rest = word.partition("…")
        word = f"{kept[:2]}…{rest}" if cut else word
        text = _UNIT.sub("§", _NUMBER.sub("#", word)) if not place else word
        escaped = re.escape(text).replace(r"\#", "#").replace("#", r"[\d,.]+").replace("§", r"\w+")
        escaped = escaped.replace("…", r"\S*…")
        parts.append(re.sub(r"[▁▂▃▄▅▆▇█]+", r"[▁▂▃▄▅▆▇█ ]+", escaped))
    return re.compile(r"\s+".join(parts))


def steps_of(page: str) -> list[tuple[str, list[str]]]:
    """(command, lines that it prints) of all blocks, in order."""
    steps: list[tuple[str, list[str]]] = []
    for kind, block in _BLOCK.findall(page):
        for line in block.splitlines() if kind == "console" else ():
            if line.startswith("$ "):
                steps.append((line.removeprefix("$ "), []))
            elif line != "…":
                steps[-1][1].append(line)
    return steps


def programs_of(page: str) -> dict[str, str]:
    """The files that a page asks for."""
    blocks = (block for kind, block in _BLOCK.findall(page) if kind == "python")
    named = ((re.match(r"# (\w+\.py):", block), block) for block in blocks)
    return {name[1]: block for name, block in named if name}


@pytest.fixture
def shell(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A folder, and an environment with `python`, `sonde` and `sudo` that are these."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, command in (
        ("python", sys.executable),
        ("sonde", f"{sys.executable} -P -m sonde"),
        ("sudo", ""),
    ):
        (tools / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (tools / name).chmod(0o755)
    folder = tmp_path / "tutorial"
    folder.mkdir()
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    return folder, {**os.environ, **environment}


def test_there_are_four() -> None:
    names = {page.stem for page in PAGES}
    assert names == {"slow-pytorch-job", "slow-server", "noisy-neighbour", "leak"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_prints_what_it_shows(page: Path, shell: tuple[Path, dict[str, str]]) -> None:
    folder, environment = shell
    text = page.read_text()
    for name, source in programs_of(text).items():
        (folder / name).write_text(source)
    shutil.copy(ROOT / "tests/data/h200_input_pipeline.sonde", folder / "rank.sonde")
    started: dict[str, list[subprocess.Popen[bytes]]] = {}
    try:
        for command, shown in steps_of(text):
            printed = run(command, folder, environment, started)
            at = 0
            for line in shown:
                found = pattern_of(line).search(printed, at)
                assert found, f"$ {command}\nhas no line like\n{line}\nin\n{printed}"
                at = found.end()
    finally:
        for name in list(started):
            end(started, name)


def run(
    command: str,
    folder: Path,
    environment: dict[str, str],
    started: dict[str, list[subprocess.Popen[bytes]]],
) -> str:
    """What a command prints. Programs in the background are found and ended as the page does,
    but only those of this test."""
    for name in re.findall(r"pkill -f (\w+\.py)", command):
        end(started, name)
    command = re.sub(r"pkill -f \w+\.py(; )?", "", command)
    command = re.sub(
        r"\$\(pgrep -f (\w+\.py)\)", lambda found: str(started[found[1]][0].pid), command
    )
    if command.endswith(" &"):
        wait, _, program = command.removesuffix(" &").rpartition("; ")
        if wait:
            time.sleep(float(wait.removeprefix("sleep ")))
        name = program.split()[-1]
        one = subprocess.Popen(["bash", "-c", f"exec {program}"], cwd=folder, env=environment)
        started.setdefault(name, []).append(one)
        return ""
    if not command:
        return ""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def end(started: dict[str, list[subprocess.Popen[bytes]]], name: str) -> None:
    """End the programs of this name that the test started."""
    for one in started.pop(name, []):
        one.send_signal(signal.SIGKILL)
        one.wait()
