# SPDX-License-Identifier: Apache-2.0
"""What `sonde explain` answers with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Code that a cause was seen in, by a sample of its stalls."""

    function: str
    share: float
    """Of the stalls looked at, by time."""


@dataclass(frozen=True, slots=True)
class CauseShare:
    """The stalls of a device that one cause has."""

    key: str
    title: str
    bound: str
    detail: str
    """Which kind of it: 'pageable', 'quota', ...; '' where there is only one."""
    ns: int
    share: float
    """Of the device's traced time."""
    count: int
    longest_ns: int
    thread: str
    """The thread that was late, '' where none was."""
    places: Sequence[Place]
    """Statistical: the heaviest stalls only, at most some dozens."""
    facts: Sequence[str]
    """Figures that bear the cause out."""


@dataclass(frozen=True, slots=True)
class KernelShare:
    """A class of kernels, or one kernel."""

    name: str
    ns: int
    share: float
    """Of the device's traced time; kernels that overlap count each."""
    count: int


@dataclass(frozen=True, slots=True)
class Bound:
    """One thing that limits the work."""

    key: str
    share: float
    """Of the device's traced time."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One next step."""

    text: str
    gain: float
    """The share of the time that it would save at most; 0 not estimated."""


@dataclass(frozen=True, slots=True)
class StepTable:
    """The period of the work."""

    count: int
    median_ns: int
    p10_ns: int
    p90_ns: int
    operations: int
    """Device operations in the usual step."""
    regularity: float
    """Share of the steps that are like the usual one."""
    anchor: str
    """The operation that each step has once."""
    start_ns: Sequence[int]
    duration_ns: Sequence[int]
    computing_ns: Sequence[int]
    like: Sequence[bool]
    """Whether each is like the usual one."""


@dataclass(frozen=True, slots=True)
class PathPart:
    """A part of the critical path."""

    name: str
    kind: str
    """kernel | copy | host | wait"""
    ns: int
    share: float


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the time in which other work was done: the steps, or what is between them."""

    name: str
    """steps | before the steps | between steps | after the steps"""
    start_ns: int
    end_ns: int
    window_ns: int
    """Its length; the phase of the steps leaves out what is between them."""
    computing: float
    bounds: Sequence[Bound]


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a verdict stands on where only windows of the time were traced."""

    windows: int
    traced_ns: int
    whole_ns: int
    """From the begin of the record to its end."""
    half_width: Mapping[str, float]
    """Of the 95 % intervals of `computing` and of the bounds' shares, in shares of the time."""
    cannot: Sequence[str]
    """Statements that windows do not allow."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits one device in one phase, why, and what to do."""

    device: int
    device_name: str
    start_ns: int
    end_ns: int
    window_ns: int
    bounds: Sequence[Bound]
    """The verdict: the first, or a mix of those listed."""
    computing: float
    """Share of the traced time with a kernel running."""
    idle: float
    """Share with nothing running: neither kernel nor copy nor collective."""
    causes: Sequence[CauseShare]
    kernels: Sequence[KernelShare]
    kernel_classes: Sequence[KernelShare]
    evidence: Sequence[str]
    advice: Sequence[Advice]
    """The best first; the first is the next step."""
    steps: StepTable | None = None
    critical_path: Sequence[PathPart] = ()
    phases: Sequence[Phase] = ()
    """Empty where all of the time is one."""
    sampling: Sampling | None = None
    """None where all of the time was traced."""

    @property
    def bound(self) -> str:
        """'input', or 'mix'."""
        return self.bounds[0].key if len(self.bounds) == 1 else "mix"


@dataclass(frozen=True, slots=True)
class Explanation:
    """All verdicts of a timeline."""

    verdicts: Sequence[Verdict]
    sources: Sequence[str]
    notes: Sequence[str]
