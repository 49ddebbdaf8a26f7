# SPDX-License-Identifier: Apache-2.0
"""What tests of several kinds share: who may run them, beside others or not, and programs with a
known truth."""

from __future__ import annotations

import compileall
import functools
import os
import re
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
    be set to keep no compiled files (PYTHONDONTWRITEBYTECODE). And let signals that are
    ignored, as under nohup or in the background of a shell, end the programs that tests start.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, _ignore)
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(Path(__file__).parents[1] / "src", quiet=2)


OBSERVE_THE_MACHINE = ("kernel", "integration", "gpu")
"""Folders of tests that start recorders, agents and servers, and look at their results."""

BESIDE = (
    *("test_agent_reload", "test_children_that_cannot_die", "test_dump", "test_go_stacks"),
    *("test_group_names_and_shares", "test_memory_truth", "test_pid_namespaces"),
    *("test_pythons", "test_refusals", "test_server_pauses", "test_slurm", "test_symbols_files"),
)
"""Files of tests/kernel that run beside others: of what they watch, only processes they started
are compared, in counts and shares, and no recorder of theirs reads the memory of the library. The
rest of tests/kernel and tests/gpu runs one after another: there rates, shares and losses are
compared, and a process that keeps a lock of its memory keeps probes from being put on everywhere.
"""

RINGS = "device time"
"""Of tests that read the memory of the library in a process: only one reader may at a time, and an
agent of another test, which watches the whole machine, would be one."""
GROUPS = dict.fromkeys(
    (
        *("test_attach", "test_attach_borrowed", "test_attach_command", "test_attach_hostile"),
        *("test_attach_waits", "test_inject_contexts", "test_inject_gates", "test_inject_hostile"),
        *("test_inject_library", "test_inject_looks", "test_inject_slots", "test_weights_kept"),
        *("test_trace", "test_trace_endings", "test_trace_price"),
        *("test_prometheus", "test_record_without_root"),  # by recorders of the whole machine
    ),
    RINGS,
)
"""Files that share something, by what they share: tests of a group run one after another."""

SPREAD = ("test_hostile_costs",)
"""Files whose tests take long and share nothing: each may run in another worker."""


@functools.cache
def depends_on_time(path: Path) -> bool:
    """Whether results of tests of that file depend on when what runs: they read a clock (of the
    time that passes, or of CPU time, of which the same work takes twice as much beside others on
    the same core), sleep, or run beside a process or thread that they start."""
    clocks = r"\b(monotonic|perf_counter|process_time|thread_time)(_ns)?\(\)|\bsleep\("
    others = r"\b(subprocess|multiprocessing|threading|asyncio|stub_driver|killed_service|served)\b"
    return re.search(f"{clocks}|{others}", path.read_text()) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Which tests need the machine for themselves, and which must not run beside one another.

    What else runs is in the result of a test that observes the machine or depends on when what
    runs, so one that fails is run again; the summary names each (RERUN).
    """
    can_rerun = config.pluginmanager.hasplugin("rerunfailures")
    for item in items:
        stem, folder = item.path.stem, item.path.parent.name
        observes = folder in OBSERVE_THE_MACHINE or stem in GROUPS
        reads_rings = GROUPS.get(stem) == RINGS
        if (folder in ("kernel", "gpu") and stem not in BESIDE) or reads_rings:
            item.add_marker(pytest.mark.machine)
        if can_rerun and (
            observes or item.get_closest_marker("machine") or depends_on_time(item.path)
        ):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=5))
    # Those that take longest begin first.
    items.sort(
        key=lambda it: (
            it.path.stem not in GROUPS, it.path.parent.name not in OBSERVE_THE_MACHINE,
        )
    )  # fmt: skip
    if os.geteuid() == 0 and Path("/sys/kernel/btf/vmlinux").exists():
        return
    reason = "needs root and a kernel with BTF"
    for item in items:
        if item.get_closest_marker("bpf"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Tests of a file, and of files that share something, run one after another in one worker.

    Not by the marker `xdist_group`: pytest-xdist 3.8 sets it in vain with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            stem = Path(path).stem
            return nodeid if stem in SPREAD else GROUPS.get(stem, path)

    return ByGroup(config, log)


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
