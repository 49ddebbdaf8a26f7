# SPDX-License-Identifier: Apache-2.0
"""Metrics that have to be polled: sources, how often they are polled, and gaps.

A `Source` is what answers: a vendor's library, a file system of the kernel. It names its
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
MARKED_ACTIVE_S = 10.0
"""How long a device counts as active after a process mapped its driver's library: it takes no
longer to its first work."""
RETRY_FIRST_S, RETRY_LAST_S = 1.0, 30.0
"""The pause before a gap's first retry, and the longest one."""


class SourceUnavailable(Exception):
    """A poll cannot be answered. `whole`: nor can the source's others, until it is opened again."""

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
        """A notice in the table of events. `value`: what it means depends on `name`; 0: none."""
        self.events.append(EventRow(time.monotonic_ns(), "notice", name, 0, 0, float(value), text))


@dataclass(frozen=True, slots=True)
class Poll:
    """A query to a source, and how often it runs."""

    name: str
    """Without the source's name: utilization, gpm."""
    period_s: float
    """FAST_S, NORMAL_S or SLOW_S, unless the source has its own reason."""
    read: Callable[[Points], None]
    """Queries and adds the answers. Raises SourceUnavailable; returns within milliseconds."""
    at_rest: Callable[[], bool] | None = None
    """Whether the device or subsystem that it queries does nothing now."""
    rest_s: float = NORMAL_S
    """The period then, where it is longer."""
    calls: Callable[[], bool] = lambda: False
    """Whether it has an answer now that is to be read before the poll is due."""
    paced: Callable[[bool], None] = lambda _: None
    """Called with whether the poll is idle (at `rest_s`), where that changed."""
    may_wait: bool = True
    """Whether nothing is lost where it runs less often than by its period."""


class Source(Protocol):
    """A vendor's library or a part of the kernel that answers polls."""

    name: str
    """Lower case, one word: nvml, drm, cgroup."""

    def open(self) -> None:
        """Get ready to answer. Raises SourceUnavailable."""

    def polls(self) -> Sequence[Poll]:
        """What can be polled, now that it is open."""

    def close(self) -> None:
        """Close whatever `open` opened; must not raise."""


@runtime_checkable
class ContinuousSource(Protocol):
    """A source that goes on querying its device between polls, and keeps the answers for them."""

    def keep_last_only(self, seconds: float) -> None:
        """Of each interval of this length only the last answer counts; 0: each does."""

    def wait(self, fd: int, until_ns: int, page: mmap) -> bool:
        """Query, until a time (CLOCK_MONOTONIC), until `fd` has something to read (True), or until
        a poll `calls`. `page`: that of `sonde.collect.subprocess_runner`, for the count and the
        name of the query that runs."""


class Gap:
    """Whether a poll or source gives no answer, since when, and when to retry it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._since_ns = 0
        self._retry_s = 0.0
        self.again_ns = 0
        """When to retry (the schedule's clock, ns); 0 while it answers."""

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
        """Retry without a pause: its source was opened again."""
        if self.again_ns:
            self.again_ns, self._retry_s = 1, RETRY_FIRST_S

    def there(self, points: Points, now_ns: int) -> None:
        """It answered: mark the gap's end, if there was one."""
        if self.again_ns:
            self.again_ns = 0
            seconds = (now_ns - self._since_ns) / 1e9
            points.note("signal_back", seconds, f"{self._name}: back after {seconds:.1f} s")
            points.add("sonde.source.up", 1.0, labels(sonde__source=self._name), now_ns)


class Gaps:
    """The gaps of a source's polls by name. They stay when the source is closed and opened again,
    so that what was missing before is reported as back afterwards."""

    def __init__(self) -> None:
        self._gaps: dict[str, Gap] = {}

    def of(self, name: str) -> Gap:
        """The gap of a poll, to be retried without a pause."""
        gap = self._gaps.setdefault(name, Gap(name))
        gap.retry()
        return gap


@dataclass(slots=True)
class _Scheduled:
    """A poll, and when it is due."""

    poll: Poll
    name: str
    """SOURCE.POLL"""
    due_ns: int
    gap: Gap
    is_idle: bool = False
    """It is due later than by its period, because it was at rest when it ran last."""

    def set_idle(self, is_idle: bool) -> None:
        """Change `is_idle`."""
        if is_idle != self.is_idle:
            self.is_idle = is_idle
            self.poll.paced(is_idle)


class Schedule:
    """Polls one source, each poll at its own period. Not safe to share between threads."""

    def __init__(
        self,
        source: Source,
        clock: Callable[[], int] = time.monotonic_ns,
        on_poll: Callable[[str], None] = lambda _: None,
        spent: Callable[[], float] | None = None,
    ) -> None:
        """`on_poll` gets the name of each poll before it runs, and '' when it has answered.
        `spent`: the CPU time (s) to report for this source, where it is more than this schedule's
        own: that of a whole subprocess."""
        self._spent = spent
        self._source = source
        self._clock = clock
        self._on_poll = on_poll
        self._polls: list[_Scheduled] = []
        self._opened = False
        self._gaps = Gaps()
        self._gap = Gap(source.name)
        """That of the whole source."""
        self._cpu_s = 0.0
        self._read_s = 0.0
        self._reported_ns = 0
        self._min_interval_s = 0.0
        self._active_until_ns = 0
        """Up to then no poll counts as at rest (`mark_active`)."""

    def set_min_interval(self, seconds: float) -> None:
        """Poll nothing that may wait more often than this; 0: each poll at its own period. Where
        that gets shorter, polls are due as if they had had their own period all the time."""
        if seconds < self._min_interval_s:
            self._hurry(self._clock())
        self._min_interval_s = seconds

    def mark_active(self) -> None:
        """The device is about to be used: for MARKED_ACTIVE_S no poll counts as at rest."""
        now_ns = self._clock()
        self._active_until_ns = now_ns + int(MARKED_ACTIVE_S * 1e9)
        self._hurry(now_ns)

    def mark_idle(self) -> None:
        """Nobody is about to use the device any more: its answers decide again."""
        self._active_until_ns = 0

    def _hurry(self, now_ns: int) -> None:
        """Have no poll due later than by its own period."""
        for it in self._polls:
            if not it.gap.again_ns:
                it.due_ns = min(it.due_ns, _tick_after(now_ns, it.poll.period_s))
                if now_ns < self._active_until_ns:
                    it.set_idle(False)

    def _at_rest(self, poll: Poll) -> bool:
        return (
            poll.at_rest is not None and self._clock() >= self._active_until_ns and poll.at_rest()
        )

    def _wake(self, now_ns: int) -> None:
        """Polls that were idle and are at rest no longer are due now, so that their next interval
        has no idle time in it."""
        for it in self._polls:
            if it.is_idle and not self._at_rest(it.poll):
                it.set_idle(False)
                it.due_ns = now_ns

    def run_due(self, points: Points) -> int:
        """Run the polls that are due. Returns when (the clock's ns) something is due next."""
        now_ns = self._clock()
        if self._opened and (next_ns := self._next_ns(now_ns)) > now_ns and not self._is_called():
            return next_ns
        began_cpu_s, began_s = time.thread_time(), time.perf_counter()
        if not self._opened:
            if now_ns < self._gap.again_ns:
                return self._gap.again_ns
            self._open(points)
            now_ns = self._clock()
        self._poll_due(now_ns, points)
        self._wake(now_ns)
        self._poll_due(now_ns, points)
        self._cpu_s += time.thread_time() - began_cpu_s
        self._read_s += time.perf_counter() - began_s
        self._report(points)
        return self._next_ns(now_ns) if self._opened else self._gap.again_ns

    def _poll_due(self, now_ns: int, points: Points) -> None:
        for it in self._polls:
            if self._opened and (it.due_ns <= now_ns or it.poll.calls()):
                self._run(it, points)

    def _is_called(self) -> bool:
        return any(it.poll.calls() for it in self._polls)

    def _next_ns(self, now_ns: int) -> int:
        return min([it.due_ns for it in self._polls], default=now_ns + int(SLOW_S * 1e9))

    def close(self) -> None:
        """Close the source."""
        if self._opened:
            self._opened = False
            self._source.close()

    def _open(self, points: Points) -> None:
        self._on_poll(f"{self._source.name}.open")
        try:
            _guarded(self._source.open)
            now_ns = self._clock()
            self._polls = [
                _Scheduled(poll, name, now_ns, self._gaps.of(name))
                for poll in self._source.polls()
                for name in [f"{self._source.name}.{poll.name}"]
            ]
        except SourceUnavailable as lost:
            self._gap.lost(lost.reason, points, self._clock())
            return
        finally:
            self._on_poll("")
        self._opened = True
        self._reported_ns = 0
        self._gap.there(points, now_ns)

    def _run(self, it: _Scheduled, points: Points) -> None:
        self._on_poll(it.name)
        try:
            _guarded(it.poll.read, points)
        except SourceUnavailable as lost:
            if lost.whole:
                self.close()
                self._polls = []
                self._gap.lost(lost.reason, points, self._clock())
                return
            it.gap.lost(lost.reason, points, self._clock())
            it.due_ns = it.gap.again_ns
            return
        finally:
            self._on_poll("")
        now_ns = self._clock()
        if it.gap.again_ns:
            it.gap.there(points, now_ns)
        it.set_idle(self._at_rest(it.poll))
        pause_s = max(
            it.poll.rest_s if it.is_idle else 0.0,
            self._min_interval_s if it.poll.may_wait else 0.0,
        )
        # After a delay, the ticks that were missed are skipped.
        it.due_ns = _tick_after(now_ns, max(it.poll.period_s, pause_s))

    def _report(self, points: Points) -> None:
        """Once a second: that the source is open, and what polling it has cost."""
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
    """The next whole multiple of a period: polls with the same one run in one wake-up."""
    period_ns = int(period_s * 1e9)
    return (now_ns // period_ns + 1) * period_ns


def _guarded(function: Callable[..., None], *arguments: Points) -> None:
    """Call a source's function; an unexpected error is a gap too, so that a defect of one source
    does not silence the others."""
    try:
        function(*arguments)
    except SourceUnavailable:
        raise
    except Exception as error:
        raise SourceUnavailable(f"a defect of Sonde: {type(error).__name__}: {error}") from error
