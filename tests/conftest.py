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


OBSERVE_THE_MACHINE = ("kernel", "integration", "gpu")
"""Folders of tests that start recorders, agents and servers, and look at their results."""

ALONE = {
    "test_agent": "holds that nothing is lost, and the recorder's own cost",
    "test_cpu_truth": "compares CPU time of samples with the kernel's",
    "test_diagnose_live": "learns what is usual, then sees a change",
    "test_explain_live": "times what holds up a thread",
    "test_fleet_services": "a thousand clients send within the time of a batch",
    "test_fleet_view": "nodes send within the time of a batch",
    "test_generated_trees": "compares shares of samples",
    "test_go_stacks": "compares shares of samples",
    "test_hanging_reads": "holds that commands end in time",
    "test_hostile_processes": "holds what hostile processes cost",
    "test_host_truth": "compares counters of the whole machine",
    "test_launch_stacks": "compares rates of launches",
    "test_losses": "fills buffers at a known rate",
    "test_many_threads": "holds that ticks come in time",
    "test_memory_truth": "compares memory of the whole machine",
    "test_network_truth": "compares counters of the whole machine",
    "test_privileges": "looks for samples of short runs",
    "test_pythons": "compares shares of samples",
    "test_rest": "holds that an agent sleeps on an idle machine",
    "test_stacks": "compares shares of samples",
    "test_unwinder": "compares shares of samples",
    "test_usage_truth": "compares CPU and run queue time with the kernel's",
    "test_waits_truth": "compares durations of waits",
}
"""Files of those folders whose results depend on what else runs, and why: they run one after
another. The others run beside each other."""

RINGS = "device time"
"""Tests that read the memory of the library in a process: only one reader may."""
GROUPS = dict.fromkeys(
    (
        *("test_attach", "test_attach_borrowed", "test_attach_command", "test_attach_hostile"),
        *("test_attach_waits", "test_inject_contexts", "test_inject_gates", "test_inject_hostile"),
        *("test_inject_library", "test_inject_looks", "test_inject_slots", "test_weights_kept"),
    ),
    RINGS,
)
"""Files that share something, by what they share: tests of a group run one after another."""

LONGEST = ("test_html_browser", "test_service", "test_stuck_loop", "test_map_locks")
"""Files that begin first, so that nothing waits for them in the end."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Which tests need the machine for themselves, and which must not run beside one another.

    What else runs is in the result of a test that observes the machine, so one that fails is run
    again; the summary names each (RERUN).
    """
    can_rerun = config.pluginmanager.hasplugin("rerunfailures")
    for item in items:
        stem, folder = item.path.stem, item.path.parent.name
        observes = folder in OBSERVE_THE_MACHINE or stem in GROUPS
        if folder == "gpu" or (observes and stem in ALONE):
            item.add_marker(pytest.mark.machine)
        if can_rerun and (observes or item.get_closest_marker("machine")):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=5))
    order = {stem: number for number, stem in enumerate(LONGEST)}
    rank = len(order)
    items.sort(
        key=lambda it: (
            order.get(it.path.stem, rank),
            it.path.parent.name not in OBSERVE_THE_MACHINE and it.path.stem not in GROUPS,
            GROUPS.get(it.path.stem, ""),
        )
    )
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
            return GROUPS.get(Path(path).stem, path)

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
