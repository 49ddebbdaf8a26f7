# SPDX-License-Identifier: Apache-2.0
"""The result of `sonde explain`: plain records, which `sonde.export.verdict` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sonde.model.causes import Bound, Cause, CauseDetail, PathKind, PhaseName
from sonde.model.traced_request import TracedRequest

MIX = "mix"
"""`Verdict.bound` where several bounds are about as large."""
SHORT_NS = 1_000_000_000
"""A recording of less than this has few samples, and few waits that ended."""
LOPSIDED = 1.2
"""Up to this ratio of its wider side to the other, an interval is written as ± the wider side."""


@dataclass(frozen=True, slots=True)
class CodeLocation:
    """Code that ran in stalls of one cause, from a sample of these stalls."""

    function: str
    share: float
    """Of the sampled stalls, by time; of kernels, of their time; of waits of streams, by count."""
    caller: str = ""
    """The code that mostly called it, in the same form; '' none, or not known."""

    @property
    def text(self) -> str:
        """'shape train.py:25 ← collate train.py:31': the function, and who called it."""
        return f"{self.function} ← {self.caller}" if self.caller else self.function


WITHOUT_CPU = "waiting for a CPU"
"""`Culprit.doing` of a thread that is mostly ready and has no CPU."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """Whose code the next step on a cause is about."""

    thread: str
    """The label of a thread: it holds what others wait for, or has their CPU; '' those that wait,
    for one another."""
    code: str
    """What it mostly ran, or waited in, in the program; '' not known."""
    doing: str
    """'on a CPU', `WITHOUT_CPU`, or the reason of a wait."""
    by_gil: bool = False
    """It is in the process that waits for it, whose threads wait for the interpreter lock, too."""
    pool: str = ""
    """Of time without a CPU: the `SpinningPool` of the program whose threads spin; '' none."""
    crowded: bool = False
    """Of time without a CPU: the program's threads want more CPUs than it may use."""
    nice: int = 0
    """Of time without a CPU: the program's nice value, where others go before it; else 0."""
    pid: int = 0
    """The process at the other end of a connection, in place of a thread; 0: it is a thread."""
    asks: bool = False
    """It waits for others' answers, and only when the threads that wait for it ask it to."""
    is_short_of_cpu: bool = False
    """While it holds a lock it is ready, without a CPU, for longer than it does anything there."""


@dataclass(frozen=True, slots=True)
class CauseShare:
    """All stalls of a device that have one cause."""

    key: Cause
    title: str
    bound: Bound
    detail: CauseDetail
    ns: int
    share: float
    """Of the device's traced time."""
    count: int
    longest_ns: int
    thread: str
    """The thread that launched late, '' where none did."""
    locations: Sequence[CodeLocation]
    """Statistical: from the longest stalls, at most some dozens."""
    facts: Sequence[str]
    """Figures that support the cause."""
    culprit: Culprit | None = None
    """None: nobody is known to be behind it."""
    in_event_loop: bool = False
    """It holds up an event loop, and so all that this serves."""

    @classmethod
    def empty(
        cls, cause: Cause, thread: str = "", locations: Sequence[CodeLocation] = ()
    ) -> CauseShare:
        """A share of 0, for records in which totals are known and single stalls are not."""
        return cls(
            key=cause,
            title=cause.description,
            bound=cause.bound,
            detail=CauseDetail.NONE,
            ns=0,
            share=0.0,
            count=0,
            longest_ns=0,
            thread=thread,
            locations=list(locations),
            facts=[],
        )


@dataclass(frozen=True, slots=True)
class KernelShare:
    """The device time of all kernels of one name."""

    name: str
    ns: int
    share: float
    """Of the device's traced time; kernels that overlap count each."""
    count: int


@dataclass(frozen=True, slots=True)
class KernelClassShare:
    """The device time of all kernels with one limit: compute, memory, or kernels (not known)."""

    bound: Bound
    ns: int
    share: float
    """Of the device's traced time; kernels that overlap count each."""
    count: int


@dataclass(frozen=True, slots=True)
class BoundShare:
    """One thing that limits the work."""

    key: Bound
    share: float
    """Of the device's traced time."""
    locations: Sequence[CodeLocation] = ()
    """Of a bound that is no cause of stalls, in recordings: code that launched the kernels, or
    where streams wait for one another."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One next step."""

    text: str
    gain: float
    """The share of the time that it saves at most; 0 not estimated."""
    with_former: bool = False
    """It goes with the step before it: the causes of both are large, and have nothing to do with
    each other."""
    causes: Sequence[Cause] = ()
    """Those that are shown with it, where time without a CPU and another one are large."""


@dataclass(frozen=True, slots=True)
class StepTable:
    """The repeating steps of the work. Columns have one entry for each step."""

    count: int
    median_ns: int
    p10_ns: int
    p90_ns: int
    operations: int
    """Device operations in a typical step."""
    regularity: float
    """Share of the steps that are like the typical one."""
    anchor: str
    """The operation that each step has once."""
    start_ns: Sequence[int]
    duration_ns: Sequence[int]
    computing_ns: Sequence[int]
    """Time with a kernel running."""
    like: Sequence[bool]
    """Whether the step is like the typical one."""


@dataclass(frozen=True, slots=True)
class PathPart:
    """A part of the critical path."""

    name: str
    kind: PathKind
    ns: int
    share: float
    """Of the step's length."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the time with work of one kind: the steps, or other work beside them."""

    name: PhaseName
    start_ns: int
    end_ns: int
    window_ns: int
    """Traced time in it; the phase of the steps excludes the time between them."""
    computing: float
    """Share of `window_ns` with a kernel running."""
    bounds: Sequence[BoundShare]


@dataclass(frozen=True, slots=True)
class Sampling:
    """The statistical basis of a verdict where only windows of the time were traced."""

    windows: int
    traced_ns: int
    whole_ns: int
    """From the first to the last moment of the record."""
    half_width: Mapping[str, float]
    """Half widths of the 95 % confidence intervals, in shares of the time: of 'computing', and of
    bounds by their values."""
    cannot: Sequence[str]
    """What windows cannot show, in words."""


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """A share of the time, estimated from runs that were timed one by one, with its interval."""

    kind: str
    """'computing': with a kernel running; 'kernel': in the kernels of one name; 'copy': in the
    copies of one direction; 'set': in memory sets."""
    name: str
    """The kernel, or 'h2d', 'd2h' and so on; '' else."""
    share: float
    low: float
    """Begin of the 95 % interval: what sampling and timing together leave open."""
    high: float
    """End of it, a share of the time."""
    sampling: float
    """Half width of the 95 % interval of sampling alone."""
    less: float
    """How far the truth may lie below the estimate because of how runs are timed: a share of the
    time."""
    more: float
    """How far above the estimate."""
    timed: int
    """Runs that were timed."""

    @property
    def half_width(self) -> float:
        """Half of the interval, a share of the time."""
        return (self.high - self.low) / 2

    @property
    def text(self) -> str:
        """'38 % ± 2.1', or '38 % (20 to 39)' where one side is much wider."""
        below, above = self.share - self.low, self.high - self.share
        # 0.0005: sides that differ by less print alike, with one decimal of a percent.
        if max(below, above) <= LOPSIDED * min(below, above) + 0.0005:
            return f"{100 * self.share:.0f} % ± {100 * max(below, above):.1f}"
        return f"{100 * self.share:.0f} % ({100 * self.low:.0f} to {100 * self.high:.0f})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits one device, why, and what to do.

    Without device time it is about a thread that launches: `device` is -1 and `device_name` the
    thread's label.
    """

    device: int
    device_name: str
    start_ns: int
    end_ns: int
    window_ns: int
    """Traced time."""
    bounds: Sequence[BoundShare]
    """One, or several of about the same size, the largest first."""
    computing: float
    """Share of the traced time with a kernel running; of a thread: in calls that wait for its
    device."""
    idle: float
    """Share with nothing running: neither kernel nor copy nor collective."""
    causes: Sequence[CauseShare]
    kernels: Sequence[KernelShare]
    kernel_classes: Sequence[KernelClassShare]
    evidence: Sequence[str]
    advice: Sequence[Advice]
    """The best first; the first is the next step."""
    steps: StepTable | None = None
    critical_path: Sequence[PathPart] = ()
    phases: Sequence[Phase] = ()
    """Empty where all of the time is one phase."""
    sampling: Sampling | None = None
    """None where all of the time was traced."""
    device_shares: Sequence[DeviceShare] = ()
    """What the device did, where runs were timed one by one: all kernels first, then the largest
    ones, copies by direction, and sets."""
    without_device: bool = False
    """Nothing called a device: it is about a busy thread, or threads that others hold up."""
    threads: int = 1
    """How many threads it is about that wait for the same, where nothing called a device: the one
    that waits longest gives the name. Shares are of the time of all of them."""
    service: str = ""
    """The program's function that answers the requests that it is about; '' not known."""
    request_ns: int = 0
    """The time of these requests, those at once counted each: shares are of it. 0: it is not about
    requests."""

    @property
    def is_short(self) -> bool:
        """Whether it is about a thread of a record that is too short to be sure."""
        return self.device < 0 and self.window_ns < SHORT_NS

    @property
    def bound(self) -> str:
        """The value of the bound, or `MIX`."""
        return self.bounds[0].key.value if len(self.bounds) == 1 else MIX


@dataclass(frozen=True, slots=True)
class Explanation:
    """All verdicts on a timeline."""

    verdicts: Sequence[Verdict]
    sources: Sequence[str]
    """The formats that the timeline was read from."""
    notes: Sequence[str]
    """What is missing or was cut, in words."""
    requests: Sequence[TracedRequest] = ()
    """The slowest traced requests, the slowest first."""
    requests_in_all: int = 0
    """How many requests were traced."""


@dataclass(frozen=True, slots=True)
class Explained:
    """The explanation of a record, or why there is none."""

    explanation: Explanation | None
    missing: str = ""
    """Why it is missing, in words."""
    command: str = ""
    """The command that gives it, or all of it where only a part is shown; '' not known."""
