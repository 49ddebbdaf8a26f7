# SPDX-License-Identifier: Apache-2.0
"""Signals that have to be asked for: sources, how often they are asked, and gaps.

A `Source` is one place that answers: a vendor's library, a file system of the kernel. It names its
`Poll`s, each with a period: fast ones run at 10 Hz or more, slow ones once in ten
seconds. A `Schedule` runs them in turn and puts their answers into `Points`.

A source may fail at any time (the device is lost, the driver is unloaded, access is denied). Its
poll raises `SourceUnavailable`, which covers either that poll alone or the whole source. The
schedule marks the gap, goes on with the other polls, and retries with growing pauses until the poll
succeeds again, which it marks too. A gap is marked by rows of `sonde.source.up` (0, then 1 again)
and a notice with its length.

Neither a schedule nor a source may be trusted to return in time: `sonde.collect.metrics` runs each
in a thread or in a separate process and marks the gap of one that hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from mmap import mmap
from typing import Protocol, runtime_checkable

from sonde.metrics import PERIODS_S, MetricRow, labels
from sonde.model.rows import EventRow

FAST_S, NORMAL_S, SLOW_S = PERIODS_S["fast"], PERIODS_S["normal"], PERIODS_S["slow"]
STIRRED_S = 10.0
"""So long does a process take, at most, from mapping a driver's library to its first work."""
RETRY_FIRST_S, RETRY_LAST_S = 1.0, 30.0


class SourceUnavailable(Exception):
    """A source does not answer. `whole`: nor will its other polls, until it was opened again."""

    def __init__(self, reason: str, whole: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.whole = whole


@dataclass(slots=True)
class Points:
    """Answers of sources: rows of the tables `metric` and `event`."""

    metrics: list[MetricRow] = field(default_factory=list)
    events: list[EventRow] = field(default_factory=list)

    def add(self, series: str, value: float, labels: str = "", time_ns: int = 0) -> None:
        """A value of a series of abi/metrics.json; `labels` as `sonde.metrics.labels` makes it."""
        row = (time_ns or time.monotonic_ns(), series, labels, float(value))
        self.metrics.append(row)

    def note(self, name: str, value: float, text: str) -> None:
        """Something that happened: a notice in the table of events. `value`: by `name`, 0 none."""
        self.events.append(EventRow(time.monotonic_ns(), "notice", name, 0, 0, float(value), text))


@dataclass(frozen=True, slots=True)
class Poll:
    """A question to a source, and how often it is asked."""

    name: str
    """Short, without the source's: utilization, gpm."""
    period_s: float
    """FAST_S, NORMAL_S or SLOW_S, unless the source has its own reason."""
    read: Callable[[Points], None]
    """Queries and adds the answers. Raises SourceUnavailable; returns within milliseconds."""
    at_rest: Callable[[], bool] | None = None
    """Whether what it asks about does nothing."""
    rest_s: float = NORMAL_S
    """The period then, where it is longer."""
    calls: Callable[[], bool] = lambda: False
    """Whether an answer is there that cannot wait for its time."""
    paced: Callable[[bool], None] = lambda _: None
    """Called with whether the source is idle, where that changed."""
    may_wait: bool = True
    """Whether nothing is lost where it is asked less often."""


class Source(Protocol):
    """One place that answers."""

    name: str
    """Lower case, one word: nvml, drm, cgroup."""

    def open(self) -> None:
        """Get ready to answer. Raises SourceUnavailable."""

    def polls(self) -> Sequence[Poll]:
        """What can be asked, now that it is open."""

    def close(self) -> None:
        """Let go of everything; must not raise."""


@runtime_checkable
class Gathering(Protocol):
    """A source that asks some of its questions while nobody reads the answers."""

    def keep_last_only(self, seconds: float) -> None:
        """Only the last answer of so long counts; 0: each does."""

    def wait(self, fd: int, until_ns: int, page: mmap) -> bool:
        """Ask, until a time (CLOCK_MONOTONIC), until `fd` has something to read (True), or until a
        poll `calls`. `page` as `sonde.collect.subprocess_runner` has it."""


class Gap:
    """Whether a signal is missing, since when, and when to ask for it again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._since_ns = 0
        self._retry_s = 0.0
        self.again_ns = 0
        """0 while the signal is there."""

    def lost(self, reason: str, points: Points, now_ns: int) -> None:
        """It did not answer: mark that, the first time, and widen the pause before the next try."""
        if not self.again_ns:
            self._since_ns, self._retry_s = now_ns, RETRY_FIRST_S
            points.note("signal_lost", 0.0, f"{self._name}: {reason}")
            points.add("sonde.source.up", 0.0, labels(sonde__source=self._name), now_ns)
        else:
            self._retry_s = min(2 * self._retry_s, RETRY_LAST_S)
        self.again_ns = now_ns + int(self._retry_s * 1e9)

    def retry(self) -> None:
        """Ask again without waiting: its source was opened again."""
        if self.again_ns:
            self.again_ns, self._retry_s = 1, RETRY_FIRST_S

    def there(self, points: Points, now_ns: int) -> None:
        """It answered: mark that, if it had not before."""
        if self.again_ns:
            self.again_ns = 0
            seconds = (now_ns - self._since_ns) / 1e9
            points.note("signal_back", seconds, f"{self._name}: back after {seconds:.1f} s")
            points.add("sonde.source.up", 1.0, labels(sonde__source=self._name), now_ns)


class Gaps:
    """Those of a source's signals by name. They outlast the source's being opened again, so that
    what was missing before is reported as back after."""

    def __init__(self) -> None:
        self._gaps: dict[str, Gap] = {}

    def of(self, name: str) -> Gap:
        """That of a signal."""
        gap = self._gaps.setdefault(name, Gap(name))
        gap.retry()
        return gap


@dataclass(slots=True)
class _Turn:
    """A poll, and when it is due."""

    poll: Poll
    name: str
    """With the source's."""
    due_ns: int
    gap: Gap
    is_idle: bool = False
    """It is due later than it would be, because what it asks about did nothing."""

    def set_min_interval(self, is_idle: bool) -> None:
        """From now on, or no longer."""
        if is_idle != self.is_idle:
            self.is_idle = is_idle
            self.poll.paced(is_idle)


class Schedule:
    """Asks one source, each poll at its own pace. Not safe to share between threads."""

    def __init__(
        self,
        source: Source,
        clock: Callable[[], int] = time.monotonic_ns,
        asking: Callable[[str], None] = lambda _: None,
        spent: Callable[[], float] | None = None,
    ) -> None:
        """`asking` gets the name of each poll before it runs, and '' when it has answered.
        `spent`: CPU time (s) of all that is for this source, where more is than asking it here."""
        self._spent = spent
        self._source = source
        self._clock = clock
        self._asking = asking
        self._turns: list[_Turn] = []
        self._opened = False
        self._gaps = Gaps()
        self._gap = Gap(source.name)
        """That of the whole source."""
        self._cpu_s = 0.0
        self._read_s = 0.0
        self._reported_ns = 0
        self._rest_s = 0.0
        self._stirred_until_ns = 0

    def set_min_interval(self, seconds: float) -> None:
        """Ask nothing more often than this, as the machine does nothing; 0: each poll at its own
        pace, those at once that would have been asked meanwhile."""
        if seconds < self._rest_s:
            self._hurry(self._clock())
        self._rest_s = seconds

    def mark_active(self) -> None:
        """What is asked about is about to be used: take nothing of it for at rest, for a while."""
        now_ns = self._clock()
        self._stirred_until_ns = now_ns + int(STIRRED_S * 1e9)
        self._hurry(now_ns)

    def mark_idle(self) -> None:
        """Nobody is about to use the device any more: its answers decide again."""
        self._stirred_until_ns = 0

    def _hurry(self, now_ns: int) -> None:
        for turn in self._turns:
            if not turn.gap.again_ns:
                turn.due_ns = min(turn.due_ns, _tick_after(now_ns, turn.poll.period_s))
                if now_ns < self._stirred_until_ns:
                    turn.set_min_interval(False)

    def _at_rest(self, poll: Poll) -> bool:
        return (
            poll.at_rest is not None and self._clock() >= self._stirred_until_ns and poll.at_rest()
        )

    def _wake(self, now_ns: int) -> None:
        """Where an answer shows activity, what was idle is due now: the time before is
        reported by itself."""
        for turn in self._turns:
            if turn.is_idle and not self._at_rest(turn.poll):
                turn.set_min_interval(False)
                turn.due_ns = now_ns

    def run_due(self, points: Points) -> int:
        """Ask what is due. Returns when (CLOCK_MONOTONIC ns) something is due next."""
        now_ns = self._clock()
        if self._opened and (next_ns := self._next_ns(now_ns)) > now_ns and not self._is_called():
            return next_ns
        began_cpu_s, began_s = time.thread_time(), time.perf_counter()
        if not self._opened:
            if now_ns < self._gap.again_ns:
                return self._gap.again_ns
            self._open(points)
            now_ns = self._clock()
        self._ask_due(now_ns, points)
        self._wake(now_ns)
        self._ask_due(now_ns, points)
        self._cpu_s += time.thread_time() - began_cpu_s
        self._read_s += time.perf_counter() - began_s
        self._report(points)
        return self._next_ns(now_ns) if self._opened else self._gap.again_ns

    def _ask_due(self, now_ns: int, points: Points) -> None:
        for turn in self._turns:
            if self._opened and (turn.due_ns <= now_ns or turn.poll.calls()):
                self._ask(turn, points)

    def _is_called(self) -> bool:
        return any(turn.poll.calls() for turn in self._turns)

    def _next_ns(self, now_ns: int) -> int:
        return min([turn.due_ns for turn in self._turns], default=now_ns + int(SLOW_S * 1e9))

    def close(self) -> None:
        """Close the source."""
        if self._opened:
            self._opened = False
            self._source.close()

    def _open(self, points: Points) -> None:
        self._asking(f"{self._source.name}.open")
        try:
            _guarded(self._source.open)
            now_ns = self._clock()
            self._turns = [
                _Turn(poll, name, now_ns, self._gaps.of(name))
                for poll in self._source.polls()
                for name in [f"{self._source.name}.{poll.name}"]
            ]
        except SourceUnavailable as lost:
            self._gap.lost(lost.reason, points, self._clock())
            return
        finally:
            self._asking("")
        self._opened = True
        self._reported_ns = 0
        self._gap.there(points, now_ns)

    def _ask(self, turn: _Turn, points: Points) -> None:
        self._asking(turn.name)
        try:
            _guarded(turn.poll.read, points)
        except SourceUnavailable as lost:
            if lost.whole:
                self.close()
                self._turns = []
                self._gap.lost(lost.reason, points, self._clock())
                return
            turn.gap.lost(lost.reason, points, self._clock())
            turn.due_ns = turn.gap.again_ns
            return
        finally:
            self._asking("")
        now_ns = self._clock()
        if turn.gap.again_ns:
            turn.gap.there(points, now_ns)
        # After a delay, the ticks that were missed are skipped.
        turn.set_min_interval(self._at_rest(turn.poll))
        rest_s = max(
            turn.poll.rest_s if turn.is_idle else 0.0, self._rest_s if turn.poll.may_wait else 0.0
        )
        turn.due_ns = _tick_after(now_ns, max(turn.poll.period_s, rest_s))

    def _report(self, points: Points) -> None:
        """Once a second: that the source answers, and what asking it has cost."""
        now_ns = self._clock()
        if now_ns - self._reported_ns < 1e9:
            return
        self._reported_ns = now_ns
        source = labels(sonde__source=self._source.name)
        points.add("sonde.source.up", float(self._opened), source, now_ns)
        spent_s = self._cpu_s if self._spent is None else self._spent()
        points.add("sonde.source.cpu_seconds", spent_s, source, now_ns)
        points.add("sonde.source.read_seconds", self._read_s, source, now_ns)


def _tick_after(now_ns: int, period_s: float) -> int:
    """The next tick of the clock: polls with the same period run in one wake-up."""
    period_ns = int(period_s * 1e9)
    return (now_ns // period_ns + 1) * period_ns


def _guarded(ask: Callable[..., None], *arguments: Points) -> None:
    """An unexpected error of a source is a gap too: a defect of one must not silence the others."""
    try:
        ask(*arguments)
    except SourceUnavailable:
        raise
    except Exception as error:
        raise SourceUnavailable(f"a defect of Sonde: {type(error).__name__}: {error}") from error
