# SPDX-License-Identifier: Apache-2.0
"""What tests of several kinds share: who may run them, beside others or not, and programs with a
known truth."""

from __future__ import annotations

import compileall
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"

Compile = Callable[..., Path]


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
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(Path(__file__).parents[1] / "src", quiet=2)


NEED_THE_MACHINE = ("kernel", "integration", "gpu")
"""Folders of tests that observe the whole machine by its clock."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What others do on the machine at that moment is in the result of a test that needs it for
    itself, so one that fails is run again; the summary names each (RERUN)."""
    can_rerun = config.pluginmanager.hasplugin("rerunfailures")
    for item in items:
        if item.path.parent.name in NEED_THE_MACHINE:
            item.add_marker(pytest.mark.machine)
        if can_rerun and item.get_closest_marker("machine"):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=5))
    if os.geteuid() == 0 and Path("/sys/kernel/btf/vmlinux").exists():
        return
    reason = "needs root and a kernel with BTF"
    for item in items:
        if item.get_closest_marker("bpf"):
            item.add_marker(pytest.mark.skip(reason=reason))


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
