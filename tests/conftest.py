# SPDX-License-Identifier: Apache-2.0
"""What tests of several kinds share: who may run them, and beside whom; programs with a known
truth."""

from __future__ import annotations

import compileall
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Generator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from scheduling import Turns, rank_of

PROGRAMS = Path(__file__).parent / "programs"

Compile = Callable[..., Path]
TURNS = pytest.StashKey[Turns]()


def _ignore(*_: object) -> None:
    """Unlike SIG_IGN, this is for this process alone: what it executes has the default action."""


def pytest_configure(config: pytest.Config) -> None:
    """Compile the product once, not in each of the hundreds of processes that tests start: they may
    have been told to keep no compiled files (PYTHONDONTWRITEBYTECODE). And let signals that are
    ignored, as under nohup or in the background of a shell, end the programs that tests start.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, _ignore)
    if hasattr(config, "workerinput"):
        config.stash[TURNS] = Turns(Path(config.option.basetemp).parent)
    else:
        compileall.compile_dir(Path(__file__).parents[1] / "src", quiet=2)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whatever --dist says, tests run beside each other as tests/scheduling.py has it."""
    from scheduling import LaneScheduling

    return LaneScheduling(config, log)


OBSERVES_THE_MACHINE = ("kernel", "integration")
"""Folders of tests that observe the whole machine by its clock. What others do on it at that moment
is in the result, so one that fails is run again; the summary names each (RERUN)."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: rank_of(item.nodeid))
    for item in items:
        if item.path.parent.name in OBSERVES_THE_MACHINE:
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=5))
    if os.geteuid() == 0 and Path("/sys/kernel/btf/vmlinux").exists():
        return
    reason = "needs root and a kernel with BTF"
    for item in items:
        if item.get_closest_marker("bpf"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """In a worker: wait for the turn, which counts for no time limit of the test."""
    turns = item.config.stash.get(TURNS, None)
    with turns.take(item) if turns else nullcontext():
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _others_may_pass(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests act as other users, in folders below pytest's: those above let everybody through."""
    folder = tmp_path_factory.getbasetemp()
    while folder.name.startswith(("popen-", "pytest-")):
        folder.chmod(0o711)
        folder = folder.parent


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Compiles tests/programs/NAME.c once: `program("truth/share", *flags)` gives the executable.

    With frame pointers, as the walk of a stack needs them.
    """
    folder = tmp_path_factory.mktemp("programs")
    built: dict[tuple[str, ...], Path] = {}

    def compile_once(name: str, *flags: str) -> Path:
        key = (name, *flags)
        if key not in built:
            compiler = shutil.which("cc")
            if compiler is None:
                pytest.skip("needs a C compiler")
            out = folder / f"{Path(name).name}-{len(built)}"
            out.mkdir()
            target = out / Path(name).name
            options = [
                "-O2",
                "-g",
                "-Wall",
                "-fno-omit-frame-pointer",
                "-fno-optimize-sibling-calls",
            ]
            source = PROGRAMS / f"{name}.c"
            subprocess.run(
                [compiler, *options, "-pthread", str(source), "-o", str(target), *flags], check=True
            )
            built[key] = target
        return built[key]

    return compile_once
