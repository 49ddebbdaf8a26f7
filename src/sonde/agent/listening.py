# SPDX-License-Identifier: Apache-2.0
"""Between ticks: asleep on the stream of process events, and who is told of what they say."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from sonde import _native, procfs
from sonde.agent import dull
from sonde.agent.attaching import Attacher
from sonde.agent.chosen import Chosen
from sonde.agent.demand import Demand
from sonde.agent.pace import Pace
from sonde.agent.quiet import NoEvents
from sonde.agent.unwinding import BUSY_GAP_S, Unwinding
from sonde.collect.metrics import Metrics
from sonde.config import Config
from sonde.resolve import Resolver

EVENT_GAP_S = 0.02
"""After reacting to process events at once, let at least this long pass: bounds the wake-ups."""
STACKLESS_EVENT_GAP_S = 0.1
"""The same for an agent that only lets metrics out: no mapping of a short process is asked for."""
CHOSEN_EVENT_GAP_S = 0.003
"""The same where processes are chosen: they are few, and their first moments count."""
CHOSEN_KEPT_S = 0.005
"""So long what others do is not looked at there; it wakes nobody, but has to be read."""
LOOK_S = 0.25
"""How often to look for what walks ask for, as long as there are news of processes."""
STACKLESS_LOOK_S = 1.0
"""The same where no stacks are taken."""
CALM_AFTER_S = 3.0
"""Without any, a load is steady: then it is looked at every tick alone. Each waking costs some 0.2
ms, most of it for memory that has gone from the caches."""
PAUSED_WAIT_MS = 250
RESYNC_LEAST_S = 0.5
RESYNC_MOST_S = 30.0
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
        self._gap_s = min(
            RESYNC_MOST_S, max(2 * self._gap_s, RESYNC_LEAST_S, cost_s / RESYNC_SHARE)
        )
        self._not_before_s = now_s + self._gap_s


class Listening:
    """Tells the resolver, the unwinder and the collectors what processes did."""

    def __init__(
        self,
        config: Config,
        events: _native.ProcessEvents | NoEvents,
        resolver: Resolver,
        unwinding: Unwinding,
        chosen: Chosen,
        attacher: Attacher | None,
        pace: Pace | Demand,
        *,
        keeps_rows: bool,
    ) -> None:
        """`keeps_rows`: somebody does, so that mappings are asked for addresses."""
        self._config = config
        self._events = events
        self._resolver = resolver
        self._unwinding = unwinding
        self._calls, self._device_time = chosen.calls, chosen.device_time
        self._metrics = next((it for it in chosen.all if isinstance(it, Metrics)), None)
        self._attacher = attacher
        self._pace = pace
        self._keeps_rows = keeps_rows
        self._looks_closely = config.on_cpu or config.off_cpu
        self._gap_s = EVENT_GAP_S if config.pids is None else CHOSEN_EVENT_GAP_S
        if not keeps_rows and config.device_time == "off":
            self._gap_s = STACKLESS_EVENT_GAP_S
        self._lost_heard = 0
        self._resyncs = Resyncs()
        self._news_s = 0.0
        """When a process did something last, or a walk asked for something."""
        self._follow_chosen()

    @property
    def lost(self) -> int:
        """Events for which there was no room."""
        return self._events.lost

    def begin(self) -> None:
        """All is new from here on: look closely for a while."""
        self._news_s = time.monotonic()

    def sleep_until(self, deadline_s: float, is_over: Callable[[], bool]) -> None:
        """Hear what comes until then (CLOCK_MONOTONIC), until `is_over`, or until it is stirred."""
        while (left_s := deadline_s - time.monotonic()) > 0:
            if is_over():
                return
            calls = self._calls if self._calls is not None and self._calls.is_used else None
            wait_s = min(left_s, self._longest_s(calls is not None))
            wait_ms = int(wait_s * 1000) + 1
            if self._events.wait(wait_ms, self._pace.fds, self._kept_ms()):
                if self._pace.is_stirred():
                    return
                self.hear()
                time.sleep(min(self._gap_s, max(0.0, deadline_s - time.monotonic())))
            elif wait_s < left_s:
                self._look()
                if calls is not None and isinstance(self._pace, Demand):
                    calls.keep_budget()  # a tick may be far

    def hear_early(self, timeout_ms: int) -> None:
        """Before the start; who observes looks at what is there when it starts."""
        self._hear_some(timeout_ms, calls=False)

    def hear_warming(self, timeout_ms: int) -> None:
        """The same while walks warm up, when calls are observed already."""
        self._hear_some(timeout_ms, calls=True)

    def hear_paused(self) -> None:
        """Wait a moment for something to be heard."""
        if self._events.wait(PAUSED_WAIT_MS):
            self.hear()
            time.sleep(EVENT_GAP_S)

    def hear(self) -> None:
        """What processes did, and what walks ask for."""
        self.take_in()
        self._look()

    def take_in(self) -> None:
        """What processes did."""
        events = self._events.drain()
        if self._device_time is not None:
            self._device_time.on_process_events(events, looking=isinstance(self._events, NoEvents))
        if (
            not events
            and self._events.lost == self._lost_heard
            and not self._resyncs.is_due(time.monotonic())
        ):
            return
        self._news_s = time.monotonic()
        self._resolver.feed(events)
        if self._calls is not None:
            self._calls.on_process_events(events)
        self._unwinding.on_process_events(events)
        if self._metrics is not None:
            self._metrics.on_process_events(events)
        if self._attacher is not None:
            self._attacher.on_process_events(events)
        if not self._keeps_rows and self._calls is not None:
            dull.pass_over(self._events, self._calls)
        if self._events.lost > self._lost_heard:
            self._lost_heard = self._events.lost
            self._follow_chosen()
            self._resyncs.lost()
        if self._resyncs.is_due(time.monotonic()):
            began_s = time.thread_time()
            self._resync()
            self._resyncs.done(time.monotonic(), time.thread_time() - began_s)

    def _resync(self) -> None:
        """Take in what is there now, whatever was heard of it."""
        self._resolver.resync()
        self._unwinding.resync()
        if self._calls is not None:
            self._calls.resync()
        if self._device_time is not None:
            self._device_time.resync()

    def _follow_chosen(self) -> None:
        """Before any event is read, and where some were lost, births among them."""
        if self._config.pids is not None:
            self._events.follow(list(procfs.family(self._config.pids)))

    def _hear_some(self, timeout_ms: int, *, calls: bool) -> None:
        if self._events.wait(timeout_ms):
            events = self._events.drain()
            self._resolver.feed(events)
            self._unwinding.on_process_events(events)
            if calls and self._calls is not None:
                self._calls.on_process_events(events)
        self._unwinding.update()

    def _look(self) -> None:
        if self._unwinding.update():
            self._news_s = time.monotonic()

    def _longest_s(self, calls_devices: bool) -> float:
        """To sleep at a stretch, as long as no process does anything."""
        if self._pace.fds:
            return self._config.tick_s if calls_devices else self._config.rest_s
        if self._unwinding.is_busy:
            return BUSY_GAP_S
        if not self._looks_closely:
            return STACKLESS_LOOK_S if self._keeps_rows or calls_devices else math.inf
        return LOOK_S if time.monotonic() < self._news_s + CALM_AFTER_S else math.inf

    def _kept_ms(self) -> int:
        """How long an event may wait to be looked at; those that bear no delay are told at once."""
        if not isinstance(self._pace, Demand):
            return int(1000 * CHOSEN_KEPT_S) if self._config.pids is not None else 0
        if self._pace.is_hurried:
            return 0
        return int(1000 * self._gap_s)
