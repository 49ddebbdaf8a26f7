# SPDX-License-Identifier: Apache-2.0
"""What tests of several kinds share: who may run them, and programs with a known truth."""

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


def pytest_configure() -> None:
    """Compile the product once, not in each of the hundreds of processes that tests start: they may
    have been told to keep no compiled files (PYTHONDONTWRITEBYTECODE). And end by signals as
    usual: a shell starts what it runs in the background with SIGINT ignored, nohup with SIGHUP,
    and programs inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    compileall.compile_dir(Path(__file__).parents[1] / "src", quiet=2)


OBSERVES_THE_MACHINE = ("kernel", "integration")
"""Folders of tests that observe the whole machine by its clock. What others do on it at that moment
is in the result, so one that fails is run again; the summary names each (RERUN)."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in OBSERVES_THE_MACHINE:
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=5))
    if os.geteuid() == 0 and Path("/sys/kernel/btf/vmlinux").exists():
        return
    reason = "needs root and a kernel with BTF"
    for item in items:
        if item.get_closest_marker("bpf"):
            item.add_marker(pytest.mark.skip(reason=reason))


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
