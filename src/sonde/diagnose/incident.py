# SPDX-License-Identifier: Apache-2.0
"""What diagnosis reports: an incident with its cause, its offender and the evidence."""

from __future__ import annotations

import enum
from typing import Final

import msgspec


class FaultCause(enum.StrEnum):
    """Why work became slower. Each file of `sonde.diagnose.causes` describes some."""

    CPU_CONTENTION = "cpu-contention"
    CPU_QUOTA = "cpu-quota"
    BAD_PINNING = "bad-pinning"
    RECLAIM = "reclaim"
    DISK_THROTTLE = "disk-throttle"
    DISK_CONTENTION = "disk-contention"
    FSYNC = "fsync"
    SLOW_FILE_SYSTEM = "slow-file-system"
    SLOW_LOADER = "slow-loader"
    INTERPRETER_LOCK = "interpreter-lock"
    LOCK = "lock"
    FROZEN = "frozen"
    GARBAGE_COLLECTION = "garbage-collection"
    SLOW_NETWORK = "slow-network"
    REMOTE_DEPENDENCY = "remote-dependency"
    DEVICE_CONTENTION = "device-contention"
    DRAM_CONTENTION = "dram-contention"
    PCIE_CONTENTION = "pcie-contention"
    DEVICE_MEMORY = "device-memory-pressure"
    PAGE_MIGRATION = "page-migration"
    SYNCHRONIZATION = "synchronization"
    RECOMPILATION = "recompilation"
    STALLED_JOB = "stalled-job"
    COLLECTIVE_MISMATCH = "collective-mismatch"
    UNKNOWN = "unknown"


BY_DEVICE: Final = frozenset(
    (
        *(FaultCause.DEVICE_CONTENTION, FaultCause.DRAM_CONTENTION, FaultCause.PCIE_CONTENTION),
        *(FaultCause.DEVICE_MEMORY, FaultCause.PAGE_MIGRATION),
        *(FaultCause.SYNCHRONIZATION, FaultCause.RECOMPILATION),
    )
)
"""Causes for which a device's counters, or the calls of it in each step, speak."""
BY_KERNEL: Final = frozenset(
    (
        *(FaultCause.FROZEN, FaultCause.CPU_QUOTA, FaultCause.BAD_PINNING, FaultCause.RECLAIM),
        *(FaultCause.DISK_THROTTLE, FaultCause.SLOW_FILE_SYSTEM, FaultCause.SLOW_NETWORK),
    )
)
"""Causes for which the kernel has figures of the cause itself, whatever the program did before."""


class Change(enum.StrEnum):
    """Changes that are no fault."""

    LOAD = "load"
    """There is more, or less, to do."""
    OWN_WORK = "own-work"
    """The program does something else: an evaluation, a checkpoint, larger batches."""
    PASSED = "passed"
    """It was over before it could be explained, or was too small to report."""


class Offender(msgspec.Struct, frozen=True):
    """Who took what the victim lacks, with the evidence of that interval."""

    pid: int
    name: str
    owner: str
    evidence: str
    share: float = 0.0
    """Of the lost time, as far as it is known; 0: not known."""


class Candidate(msgspec.Struct, frozen=True):
    """One cause, and how much of the lost time it accounts for."""

    cause: FaultCause
    share: float
    """0..1"""
    evidence: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    """What makes the cause less likely."""
    offender: Offender | None = None
    next_step: str = ""


class RankReport(msgspec.Struct, frozen=True):
    """One rank of a job that has stalled."""

    rank: int
    pid: int
    is_missing: bool
    """The others wait for it."""
    doing: str
    line: str
    """'function file:line' of its innermost code of the program; '' not known."""
    stack: tuple[str, ...] = ()
    """Of its first thread, leaf first."""
    failed: str = ""
    """Why its stack is missing."""


class Verdict(msgspec.Struct, frozen=True):
    """The result of an explanation: causes, the likeliest first, or a change that is no fault."""

    candidates: tuple[Candidate, ...]
    slowdown: float
    """Time of a piece of work, divided by what it took before; 1: unchanged."""
    lost: dict[str, float]
    """Where the time went: seconds more in a second, by part."""
    change: Change | None = None
    reason: str = ""
    """Why it is no fault."""
    ranks: tuple[RankReport, ...] = ()
    """Of a job that has stalled."""

    @property
    def cause(self) -> FaultCause:
        """The likeliest one."""
        return self.candidates[0].cause if self.candidates else FaultCause.UNKNOWN

    @property
    def is_fault(self) -> bool:
        """Whether something is wrong; else it is a change of the work itself. Of single processes
        only faults are reported."""
        return self.change is None


class Incident(msgspec.Struct, frozen=True):
    """A slowdown that was noticed and explained. Times: CLOCK_MONOTONIC, ns."""

    victim: int
    victim_name: str
    victim_owner: str
    began_ns: int
    """Estimate: the start of the first interval that was out of the ordinary."""
    noticed_ns: int
    explained_ns: int
    noticed_by: tuple[str, ...]
    """Series that changed."""
    verdict: Verdict
    number: int = 0
    """Of all that the agent found, from 1 on."""
    part_of: int = 0
    """The number of an incident of the same cause that was reported before and goes on; 0: it is
    news."""
    left_out: int = 0
    """Waits and places of the victim for which the moments had no room: its shortest ones."""
