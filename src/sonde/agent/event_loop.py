# SPDX-License-Identifier: Apache-2.0
"""Between ticks: asleep on the stream of process events, which are dispatched to listeners."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from sonde import _native, procfs
from sonde.agent.mapping_filter import ignore_mappings
from sonde.agent.null_process_events import NullProcessEvents
from sonde.agent.scheduler import Scheduler
from sonde.agent.unwinding import BUSY_GAP_S, Unwinding
from sonde.collect.collector import Collector, ProcessEventListener
from sonde.config import Config
from sonde.resolve import Resolver

EVENT_GAP_S = 0.02
"""After reacting to process events at once, let at least this long pass: bounds the wake-ups."""
STACKLESS_EVENT_GAP_S = 0.1
"""The same for an agent that only lets metrics out: no mapping of a short process is asked for."""
CHOSEN_EVENT_GAP_S = 0.003
"""The same where processes are chosen: they are few, and their first moments count."""
LOOK_S = 0.25
"""How often to look for what walks ask for, as long as there are news of processes."""
STACKLESS_LOOK_S = 1.0
"""The same where no stacks are taken."""
CALM_AFTER_S = 3.0
"""Without any, a load is constant: then it is looked at every tick alone. Each wake-up costs some
0.2 ms, most of it for memory that has gone from the caches."""
PAUSED_WAIT_MS = 250
RESYNC_LEAST_S = 0.5
MAX_RESYNC_S = 30.0
RESYNC_CALM_S = 30.0
"""After so long without losses the next one is looked into at once again."""
RESYNC_SHARE = 0.05
"""Of a CPU, for looking at everything again."""


class Resyncs:
    """When to look at everything again, after events were lost.

    At once, the first time. A process that maps in a loop loses events all the time, and each look
    costs as much as a second of recording: while losses go on, looks become rare.
    """

    def __init__(self) -> None:
        self._is_wanted = False
        self._not_before_s = 0.0
        self._gap_s = 0.0

    def lost(self) -> None:
        """Events were lost."""
        self._is_wanted = True

    def is_due(self, now_s: float) -> bool:
        """Whether to look now."""
        return self._is_wanted and now_s >= self._not_before_s

    def done(self, now_s: float, cost_s: float) -> None:
        """A look has just ended, and cost so much CPU time."""
        self._is_wanted = False
        if now_s > self._not_before_s + RESYNC_CALM_S:
            self._gap_s = 0.0
        self._gap_s = min(MAX_RESYNC_S, max(2 * self._gap_s, RESYNC_LEAST_S, cost_s / RESYNC_SHARE))
        self._not_before_s = now_s + self._gap_s


class EventLoop:
    """Sleeps until the next tick, and dispatches process events to all that listen to them: the
    resolver, the unwinder, the collectors."""

    def __init__(
        self,
        config: Config,
        events: _native.ProcessEvents | NullProcessEvents,
        resolver: Resolver,
        unwinding: Unwinding,
        collectors: Sequence[Collector],
        scheduler: Scheduler,
        *,
        keeps_rows: bool,
    ) -> None:
        """`collectors`: all of the node, none of which listens before `listen`. `keeps_rows`:
        somebody keeps rows, so that addresses are looked up in mappings."""
        self._config = config
        self._events = events
        self._resolver = resolver
        self._unwinding = unwinding
        self._collectors = collectors
        self._first: list[Collector] = []
        """Those that need events before the others do."""
        self._listeners: list[ProcessEventListener] = [resolver, unwinding]
        self._scheduler = scheduler
        self._keeps_rows = keeps_rows
        self._looks_closely = config.on_cpu or config.off_cpu
        self.gap_s = EVENT_GAP_S if config.pids is None else CHOSEN_EVENT_GAP_S
        """After some events were read, at least so long passes."""
        if not keeps_rows and config.device_time == "off":
            self.gap_s = STACKLESS_EVENT_GAP_S
        self._lost_before = 0
        self._resyncs = Resyncs()
        self._news_s = 0.0
        """When a process did something last, or a walk asked for something."""
        self.is_idle = False
        """No stack is taken at present, so that no walk asks for anything."""
        self._follow_chosen()

    @property
    def lost(self) -> int:
        """Events for which there was no room."""
        return self._events.lost

    def listen(
        self, collectors: Sequence[Collector], others: Sequence[ProcessEventListener] = ()
    ) -> None:
        """From now on events are dispatched to these collectors, which are started, and to others,
        besides the resolver and the unwinder."""
        self._first = [it for it in collectors if it.needs_events_first]
        rest = [it for it in collectors if not it.needs_events_first]
        self._listeners = [self._resolver, self._unwinding, *rest, *others]

    def begin(self) -> None:
        """All is new from here on: look closely for a while."""
        self._news_s = time.monotonic()

    def sleep_until(self, deadline_s: float, is_over: Callable[[], bool]) -> None:
        """Dispatch what comes until then (CLOCK_MONOTONIC), until `is_over`, or until the scheduler
        is woken."""
        while (left_s := deadline_s - time.monotonic()) > 0:
            if is_over():
                return
            wait_s = min(left_s, self._longest_s())
            wait_ms = int(wait_s * 1000) + 1
            kept_ms = int(1000 * self._scheduler.event_delay_s(self.gap_s))
            if self._events.wait(wait_ms, self._scheduler.fds, kept_ms):
                if self._scheduler.is_woken():
                    return
                self.poll()
                time.sleep(min(self.gap_s, max(0.0, deadline_s - time.monotonic())))
            elif wait_s < left_s:
                self._update_unwinder()
                self._scheduler.between_ticks()

    def poll_starting(self, timeout_ms: int) -> None:
        """Wait for events before all is started, and dispatch them. Losses of events are left for
        later: a collector that starts looks at what is there."""
        if self._events.wait(timeout_ms):
            events = self._events.drain()
            for listener in self._listeners:
                listener.on_process_events(events)
        self._unwinding.update()

    def poll_paused(self) -> None:
        """Wait a moment for events."""
        if self._events.wait(PAUSED_WAIT_MS):
            self.poll()
            time.sleep(EVENT_GAP_S)

    def poll(self) -> None:
        """Dispatch what processes did, and see to what walks ask for."""
        self.dispatch()
        self._update_unwinder()

    def dispatch(self) -> None:
        """Dispatch what processes did."""
        events = self._events.drain()
        for collector in self._first:
            collector.on_process_events(events)
        if (
            not events
            and self._events.lost == self._lost_before
            and not self._resyncs.is_due(time.monotonic())
        ):
            return
        self._news_s = time.monotonic()
        for listener in self._listeners:
            listener.on_process_events(events)
        if not self._keeps_rows:
            ignore_mappings(self._events, self._collectors)
        if self._events.lost > self._lost_before:
            self._lost_before = self._events.lost
            self._follow_chosen()
            self._resyncs.lost()
        if self._resyncs.is_due(time.monotonic()):
            began_s = time.thread_time()
            self._resync()
            self._resyncs.done(time.monotonic(), time.thread_time() - began_s)

    def _resync(self) -> None:
        """Take in what is there now, whatever events reported of it."""
        for listener in (*self._listeners, *self._first):
            listener.on_events_lost()

    def _follow_chosen(self) -> None:
        """Before any event is read, and where some were lost, births among them."""
        if self._config.pids is not None:
            self._events.follow(list(procfs.family(self._config.pids)))

    def _update_unwinder(self) -> None:
        if self._unwinding.update():
            self._news_s = time.monotonic()

    def _longest_s(self) -> float:
        """To sleep at a stretch, as long as no process does anything."""
        is_charged = any(it.is_charged for it in self._collectors)
        if self._scheduler.fds:
            return self._config.tick_s if is_charged else self._config.rest_s
        if self._unwinding.is_busy:
            return BUSY_GAP_S
        if self.is_idle:
            return math.inf
        if not self._looks_closely:
            return STACKLESS_LOOK_S if self._keeps_rows or is_charged else math.inf
        return LOOK_S if time.monotonic() < self._news_s + CALM_AFTER_S else math.inf
