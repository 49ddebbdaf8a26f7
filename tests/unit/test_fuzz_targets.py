# SPDX-License-Identifier: Apache-2.0
"""Every fuzz target takes its seeds, and what once broke it, within the limits of `make fuzz`."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from fuzz.targets import DATA, ROOT, RSS_MB, TARGETS, Target, environment

NATIVE = [target for target in TARGETS if target.is_native]
PYTHON = [target for target in TARGETS if not target.is_native]
MAX_SEEDS_BYTES = 300_000


def printed_by(command: list[str]) -> str:
    # From a shell: a process that we start inherits our peak of memory as its first one
    # (ru_maxrss), and libFuzzer holds that to the limit.
    from_a_shell = ["sh", "-c", '"$@"; exit $?', "sh", *command]
    done = subprocess.run(
        from_a_shell, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("target", NATIVE, ids=lambda it: it.name)
def test_a_native_parser_takes_its_seeds_and_what_once_broke_it(target: Target) -> None:
    limits = ("-runs=0", "-timeout=5", f"-rss_limit_mb={RSS_MB}", "-max_len=10000000")
    command = target.command(*limits, *map(str, target.folders))
    try:
        printed = printed_by(command)
    except FileNotFoundError:
        pytest.skip("the fuzz targets are not built: scripts/setup build fuzz")

    assert re.search(r"INITED|DONE", printed)


@pytest.mark.parametrize("target", PYTHON, ids=lambda it: it.name)
def test_a_python_reader_takes_its_seeds_and_what_once_broke_it(target: Target) -> None:
    runner = str(ROOT / "fuzz/python/run_target.py")
    command = [sys.executable, runner, "--replay", target.name, *map(str, target.folders)]

    printed = printed_by(command)

    summary = re.search(r"replayed (\d+) inputs, slowest \S+ s, peak (\d+) MB", printed)
    assert summary and int(summary[1]) > 0 and int(summary[2]) <= RSS_MB


def test_every_target_has_seeds_and_all_of_them_are_small() -> None:
    assert [target.name for target in TARGETS if not target.folders] == []
    sizes = [file.stat().st_size for file in DATA.rglob("*") if file.is_file()]
    assert sum(sizes) < MAX_SEEDS_BYTES
