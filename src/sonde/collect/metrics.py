# SPDX-License-Identifier: Apache-2.0
"""The collector of polled metrics: runs sources where they cannot block the agent.

Sources that read kernel files run in a thread (`ThreadRunner`), one after another. Sources that use
a vendor's library run in a subprocess (`SubprocessRunner`): such a library may hang in the driver
forever, crash, or leak, and a subprocess can be abandoned. Each tick drains their points. A runner
that is silent for too long is a gap, marked with the query that it hangs in; a subprocess is then
killed and another one started, with growing pauses.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from sonde._native import ExitEvent, MmapEvent, ProcessEvent
from sonde.collect.collector import Batch, Collector
from sonde.collect.polling import MARKED_ACTIVE_S, Points, Schedule, Source
from sonde.metrics import labels

SILENT_S = 3.0
"""A poll that takes longer than this counts as hanging."""
DRIVER_LIBRARY = re.compile(r"/lib(cuda|amdhip64|ze_loader)\.so[.0-9]*$")
"""What a process maps before it uses a device."""
MAX_NEWCOMERS = 1_024
"""Processes that mapped such a library lately and are remembered."""
POINTS_KEPT = 200_000
"""Rows of one thread between two ticks, of metrics and of events each. Its sources share them: one
may take what others leave, and the rest is lost, and counted."""

Row = TypeVar("Row")


class Runner(Protocol):
    """Polls sources where they cannot hold up the agent."""

    name: str

    def start(self) -> None:
        """Begin to poll; never raises for what a source lacks: that is a gap."""

    def take(self) -> Points:
        """Rows since the last call; never blocks."""

    def set_min_interval(self, seconds: float) -> None:
        """Poll no more often than this, unless the device's own activity sets the interval; 0: at
        each poll's own period."""

    def keep_last_only(self, seconds: float) -> None:
        """Nobody stores the points: only the last value of each interval counts; 0: each does."""

    def mark_active(self) -> None:
        """A process is about to use a device: poll it as if it were in use."""

    def mark_idle(self) -> None:
        """Those processes have exited: follow the device's own activity again."""

    def stop(self) -> None:
        """Stop polling, without waiting for a source that hangs."""

    @property
    def lost(self) -> int:
        """Points for which there was no room."""


class ThreadRunner:
    """Polls sources in a thread of this process: only those that cannot hang for long."""

    def __init__(self, name: str, sources: Sequence[Source]) -> None:
        self.name = name
        self.lost = 0
        self._schedules = [Schedule(source, on_poll=self._on_poll) for source in sources]
        self._points = [Points() for _ in self._schedules]
        """Rows of each source since the last `take`."""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._min_interval_s = 0.0
        self._woken = threading.Event()
        self._running: tuple[str, int] = ("", 0)
        """The poll that runs now ('' none), and since when (CLOCK_MONOTONIC, ns)."""
        self._hangs: tuple[str, int] | None = None
        """The same of a poll whose gap was marked."""
        self._thread = threading.Thread(target=self._run, name=f"sonde-{name}", daemon=True)

    def start(self) -> None:
        """Begin to poll."""
        self._thread.start()

    def take(self) -> Points:
        """Rows since the last call, and the gap of a source that hangs."""
        points = Points()
        with self._lock:
            taken, self._points = self._points, [Points() for _ in self._schedules]
        for of_source in taken:
            points.metrics += of_source.metrics
            points.events += of_source.events
        name, since_ns = self._running
        now_ns = time.monotonic_ns()
        if self._hangs is not None and self._running != self._hangs:
            mark_back(points, *self._hangs)
            self._hangs = None
        if name and now_ns - since_ns > SILENT_S * 1e9 and self._hangs is None:
            self._hangs = (name, since_ns)
            mark_lost(points, name, "does not answer")
        return points

    def set_min_interval(self, seconds: float) -> None:
        """Poll nothing more often than this; 0: each poll at its own period again."""
        self._min_interval_s = seconds
        if not seconds:
            self._woken.set()

    def keep_last_only(self, seconds: float) -> None:
        """Poll nothing more often than this."""
        self.set_min_interval(seconds)

    def mark_active(self) -> None:
        """Nothing: no device is polled here."""

    def mark_idle(self) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Stop polling."""
        self._ended.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(0.2)

    def _on_poll(self, name: str) -> None:
        self._running = (name, time.monotonic_ns())

    def _run(self) -> None:
        while not self._ended.is_set():
            self._woken.clear()
            for schedule in self._schedules:
                schedule.set_min_interval(self._min_interval_s)
            due_ns = min(map(self._run_due, range(len(self._schedules))))
            if not self._ended.is_set():
                self._woken.wait(max(0.001, (due_ns - time.monotonic_ns()) / 1e9))
        for schedule in self._schedules:
            schedule.close()

    def _run_due(self, number: int) -> int:
        """Run the polls of a source that are due. Returns when (ns) the next one is."""
        points = Points()
        due_ns = self._schedules[number].run_due(points)
        with self._lock:
            self._points[number].metrics += points.metrics
            self._points[number].events += points.events
            self.lost += cut_to_shares([it.metrics for it in self._points], POINTS_KEPT)
            self.lost += cut_to_shares([it.events for it in self._points], POINTS_KEPT)
        return due_ns


def cut_to_shares(rows: Sequence[list[Row]], limit: int) -> int:
    """Keep `limit` rows of all these lists: all of a list that is no longer than an equal share of
    what shorter ones leave, that share of each longer one. Returns how many were cut off."""
    lost = sum(map(len, rows)) - limit
    if lost <= 0:
        return 0
    for left, shortest in zip(range(len(rows), 0, -1), sorted(rows, key=len), strict=True):
        del shortest[limit // left :]
        limit -= len(shortest)
    return lost + limit


def mark_lost(points: Points, name: str, reason: str) -> None:
    """Mark the begin of a gap; `name`: of the poll that hangs, SOURCE.POLL."""
    points.note("signal_lost", 0.0, f"{name}: {reason}")
    points.add("sonde.source.up", 0.0, labels(sonde__source=name.partition(".")[0]))


def mark_back(points: Points, name: str, since_ns: int) -> None:
    """Mark the end of that gap, which began at `since_ns`."""
    seconds = (time.monotonic_ns() - since_ns) / 1e9
    points.note("signal_back", seconds, f"{name}: back after {seconds:.1f} s")
    points.add("sonde.source.up", 1.0, labels(sonde__source=name.partition(".")[0]))


class Metrics(Collector):
    """A Collector whose rows are points of metrics."""

    name = "metrics"

    def __init__(self, runners: Sequence[Runner]) -> None:
        self._runners = runners
        self._newcomers: dict[int, int] = {}
        """When (ns) processes mapped a driver's library, of those that did lately, by pid."""

    def start(self) -> None:
        """Start all runners."""
        for runner in self._runners:
            runner.start()

    def set_interval(self, seconds: float, *, keep_last_only: bool = False) -> None:
        """Poll sources no more often than this."""
        for runner in self._runners:
            if keep_last_only:
                runner.keep_last_only(seconds)
            else:
                runner.set_min_interval(seconds)

    def wants_mapping(self, path: str) -> bool:
        """Whether it is the library of a device's driver."""
        return DRIVER_LIBRARY.search(path) is not None

    def on_process_events(self, events: Sequence[ProcessEvent]) -> None:
        """A process that maps the library of a device's driver is about to use the device, unless
        it ends at once: many a node runs nvidia-smi every few seconds, which maps it too."""
        newcomers, came = self._newcomers, False
        for event in events:
            if isinstance(event, MmapEvent):
                if not DRIVER_LIBRARY.search(event.path):
                    continue
                newcomers.pop(event.pid, None)
                if len(newcomers) >= MAX_NEWCOMERS:
                    del newcomers[next(iter(newcomers))]  # its mark ends by its time alone
                newcomers[event.pid] = event.time_ns
                came = True
            elif newcomers and isinstance(event, ExitEvent):
                if event.tid != event.pid or not newcomers.pop(event.pid, 0):
                    continue
                now_ns = event.time_ns
                limit_ns = MARKED_ACTIVE_S * 1e9
                if all(now_ns - since_ns > limit_ns for since_ns in newcomers.values()):
                    newcomers.clear()
                    came = False
                    self._signal(is_idle=True)
        if came:
            self._signal(is_idle=False)

    def _signal(self, *, is_idle: bool) -> None:
        for runner in self._runners:
            if is_idle:
                runner.mark_idle()
            else:
                runner.mark_active()

    def drain(self, since_ns: int, to_the_end: bool) -> Batch:
        """Rows since the last call: of `metric` and `event`."""
        batch = Batch()
        for runner in self._runners:
            points = runner.take()
            batch.metrics += points.metrics
            batch.rows.setdefault("event", []).extend(points.events)
            batch.seen += len(points.metrics)
        return batch

    def stop(self) -> None:
        """Stop all runners."""
        for runner in self._runners:
            runner.stop()

    def pause(self) -> None:
        """Nothing: sources go on being polled, and `resume` forgets the points."""

    def resume(self) -> None:
        """Forget the points since `pause`."""
        self.drain(0, to_the_end=True)

    def losses(self) -> Mapping[str, int]:
        """Points lost so far, by runner."""
        return {f"{runner.name}.points": runner.lost for runner in self._runners if runner.lost}
