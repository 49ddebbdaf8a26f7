# SPDX-License-Identifier: Apache-2.0
"""Which tests run beside which others, where several pytest-xdist workers share a machine.

A module's tests run one after another in one worker, so that its fixtures are made once. Modules
that observe or attack the machine as a whole follow one another in a single worker: their agents
would see each other's work. Everything else runs beside them in the other workers, and what
observes nothing at a lower priority, so that it takes few CPUs from those that measure.

Markers hold tests of different workers apart where that is not enough:

- `alone`: no other test runs meanwhile;
- `takes_rings`: an agent that reads the device time of every process that it finds; `ring`: a
  process that has some, which one agent at a time may read;
- `attacks`: makes those wait who read the state of its processes; `observes`: a recorder, which
  reads that of all.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler.loadscope import LoadScopeScheduling

JUDGE_OWN_PROCESSES = frozenset(
    f"tests/kernel/test_{name}.py"
    for name in ("children_that_cannot_die", "dump", "memory_truth", "symbols_files", "unwinder")
)
"""Modules of tests/kernel whose checks are about programs that they start, whatever others do."""

OBSERVE_THE_MACHINE = frozenset(
    f"tests/{name}.py"
    for name in (
        "integration/test_otlp",
        "integration/test_prometheus",
        "integration/test_record_without_root",
        "unit/test_cli_record",
    )
)
"""Modules elsewhere that do: they start an agent or a recorder of the whole machine."""

LONGEST_FIRST = tuple(
    f"tests/{name}.py"
    for name in (
        *("unit/test_inject_library", "kernel/test_memory_truth", "integration/test_attach"),
        *("integration/test_hostile_endpoints", "integration/test_fleet_services"),
        *("integration/test_attach_borrowed", "integration/test_html_browser"),
        *("integration/test_fleet_hostile", "kernel/test_unwinder", "golden/test_explain_h200"),
        *("unit/test_capture_bombs", "unit/test_fleet_limits"),
    )
)
"""Modules that take more than ten seconds, so that none of them is left for the end."""


NICER = 10
"""Of tests that yield."""


def lane_of(nodeid: str) -> str:
    """What runs in one worker, one after another: the machine's observers, or a module."""
    path = nodeid.partition("::")[0]
    of_kernel = path.startswith("tests/kernel/") and path not in JUDGE_OWN_PROCESSES
    return "machine" if of_kernel or path in OBSERVE_THE_MACHINE else path


def yields(nodeid: str) -> bool:
    """Whether a test leaves the CPUs to others: those of these folders know no clock."""
    return nodeid.startswith(("tests/golden/", "tests/unit/")) and lane_of(nodeid) != "machine"


def rank_of(nodeid: str) -> int:
    """Where a test's lane stands in the queue: lower is earlier."""
    lane = lane_of(nodeid)
    if lane == "machine":
        return -1
    return LONGEST_FIRST.index(lane) if lane in LONGEST_FIRST else len(LONGEST_FIRST)


class LaneScheduling(LoadScopeScheduling):  # type: ignore[misc]  # without types
    """Hands out lanes in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return lane_of(nodeid)


class _SharedLock:
    """Held by one that wants it alone, or by any number of others, over all workers."""

    def __init__(self, path: Path) -> None:
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
        self._gate, self._held = (os.open(f"{path}{it}", flags, 0o600) for it in (".gate", ".held"))

    @contextmanager
    def hold(self, alone: bool) -> Iterator[None]:
        # Who waits to be alone keeps the gate closed: no stream of others can keep it waiting.
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        fcntl.flock(self._held, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._held, fcntl.LOCK_UN)


class Turns:
    """Holds tests of different workers apart, as their markers ask."""

    def __init__(self, folder: Path) -> None:
        """`folder`: one that the workers share."""
        self._niceness = os.getpriority(os.PRIO_PROCESS, 0)
        self._machine = _SharedLock(folder / "machine")
        self._pairs = {
            pair: _SharedLock(folder / pair[0])
            for pair in (("attacks", "observes"), ("takes_rings", "ring"))
        }

    @contextmanager
    def take(self, item: pytest.Item) -> Iterator[None]:
        """Wait for a test's turn, which lasts while the block runs."""
        marks = {mark.name for mark in item.iter_markers()}
        with ExitStack() as held:  # in one order, so that no two wait for each other
            for (one, many), lock in self._pairs.items():
                if marks & {one, many}:
                    held.enter_context(lock.hold(one in marks))
            held.enter_context(self._machine.hold("alone" in marks))
            if os.geteuid() == 0:  # others could not take it back
                lower = yields(item.nodeid) and not marks & {"alone", "ring"}
                os.setpriority(os.PRIO_PROCESS, 0, self._niceness + NICER * lower)
            yield
