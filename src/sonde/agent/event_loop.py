# SPDX-License-Identifier: Apache-2.0
"""Between ticks: sleeps until process events come, and dispatches them to listeners."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence

from sonde import _native, procfs
from sonde._native import ProcessEvent
from sonde.agent.mapping_filter import ignore_mappings
from sonde.agent.null_process_events import NullProcessEvents
from sonde.agent.scheduler import Scheduler
from sonde.agent.unwinding import BUSY_GAP_S, Unwinding
from sonde.collect.collector import Collector, ProcessEventListener
from sonde.config import Config
from sonde.model.rows import EventRow
from sonde.resolve import Resolver

EVENT_GAP_S = 0.02
"""After some process events were dispatched, sleep at least this long: bounds the wake-ups."""
STACKLESS_EVENT_GAP_S = 0.1
"""The same for an agent that only exports metrics: no address is looked up in the mappings of a
short-lived process."""
GIVEN_EVENT_GAP_S = 0.003
"""The same in a recording of given processes: they are few, and their first moments count."""
WALK_REQUESTS_S = 0.25
"""How often to read what walks ask for (processes and unwind tables that the kernel lacks) while
process events come."""
STACKLESS_REQUESTS_S = 1.0
"""How often to wake up between ticks where no stacks are taken."""
QUIET_AFTER_S = 3.0
"""After this long without process events and requests of walks, the agent wakes up at ticks alone.
Each wake-up costs some 0.2 ms, most of it for memory that has left the CPU's caches."""
PAUSED_WAIT_MS = 250
"""How long to wait for process events at a time while the agent is paused."""
MIN_RESYNC_S = 0.5
MAX_RESYNC_S = 30.0
"""Between two resyncs, while losses go on."""
RESYNC_RESET_S = 30.0
"""After this long without losses, the next one is followed by a resync at once again."""
RESYNC_SHARE = 0.05
"""Share of a CPU that resyncs may take."""
MAX_UNSEEN = 4
"""Processes of which events were left out that are read from /proc at one dispatch."""
REPORT_S = 10.0
"""Between two reports of which party's events were lost or left out."""
REPORTED = 16
"""Parties in one report at most."""
LEFT_OUT = "process_events_left_out"
"""Name of the notice."""


class Resyncs:
    """When to read the state of all processes again, after process events were lost.

    The first time: at once. A process that maps files in a loop makes events get lost all the time,
    and a resync costs as much as a second of recording: while losses go on, resyncs become rare.
    """

    def __init__(self) -> None:
        self._is_needed = False
        self._not_before_s = 0.0
        self._gap_s = 0.0

    def lost(self) -> None:
        """Events were lost."""
        self._is_needed = True

    def is_due(self, now_s: float) -> bool:
        """Whether to resync now (CLOCK_MONOTONIC, s)."""
        return self._is_needed and now_s >= self._not_before_s

    def done(self, now_s: float, cost_s: float) -> None:
        """A resync has just ended, which cost `cost_s` of CPU time."""
        self._is_needed = False
        if now_s > self._not_before_s + RESYNC_RESET_S:
            self._gap_s = 0.0
        self._gap_s = min(MAX_RESYNC_S, max(2 * self._gap_s, MIN_RESYNC_S, cost_s / RESYNC_SHARE))
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
        names_code: bool,
    ) -> None:
        """`collectors`: all of the node, none of which listens before `listen`. `names_code`:
        frames get names, so that addresses are looked up in mappings; an agent for metrics alone
        needs none."""
        self._config = config
        self._events = events
        self._resolver = resolver
        self._unwinding = unwinding
        self._collectors = collectors
        self._first: list[Collector] = []
        """Collectors that get events before the other listeners (`needs_events_first`)."""
        self._listeners: list[ProcessEventListener] = [resolver, unwinding]
        self._scheduler = scheduler
        self._names_code = names_code
        self._takes_stacks = config.on_cpu or config.off_cpu
        self.gap_s = EVENT_GAP_S if config.pids is None else GIVEN_EVENT_GAP_S
        """After some events were dispatched, sleep at least this long."""
        if not names_code and config.device_time == "off":
            self.gap_s = STACKLESS_EVENT_GAP_S
        self._lost_before = 0
        self._resyncs = Resyncs()
        self._next_report_s = 0.0
        self._reported = 0
        """`lost` at the last report."""
        self._last_event_s = 0.0
        """When the last process event or request of a walk came (CLOCK_MONOTONIC)."""
        self.is_idle = False
        """No stack is taken at present, so that no walk asks for anything."""
        self._given: Collection[int] | None = None
        """Given processes with their children, when last looked for; None: all are recorded."""
        self._follow_given(is_patient=True)

    @property
    def lost(self) -> int:
        """Process events for which the kernel's buffers had no room, and those beyond the share of
        a user or container."""
        return self._events.lost + self._events.left_out

    def left_out(self, now_ns: int) -> list[EventRow]:
        """Whose events were lost or left out; at most every `REPORT_S`."""
        if self.lost == self._reported or time.monotonic() < self._next_report_s:
            return []
        self._reported, self._next_report_s = self.lost, time.monotonic() + REPORT_S
        rows = []
        for party, pid, count in self._events.take_left_out()[:REPORTED]:
            if self._given is not None and pid not in self._given:
                pid = 0  # a recording of given processes names no other
            found = self._resolver.processes.last_of(pid) if pid else None
            start_ns, name = (found.start_ns, found.comm) if found is not None else (0, "")
            most = f", most of process {pid} ({name})" if name else ""
            text = f"events of processes of {procfs.name_of(party)}{most}"
            row = EventRow(now_ns, "notice", LEFT_OUT, pid, start_ns, float(count), text)
            rows.append(row)
        return rows

    def listen(
        self, collectors: Sequence[Collector], others: Sequence[ProcessEventListener] = ()
    ) -> None:
        """From now on events are dispatched to these collectors, which are started, and to others,
        besides the resolver and the unwinder."""
        self._first = [it for it in collectors if it.needs_events_first]
        rest = [it for it in collectors if not it.needs_events_first]
        self._listeners = [self._resolver, self._unwinding, *rest, *others]

    def begin(self) -> None:
        """The recording starts or goes on: read what walks ask for often, for a while."""
        self._last_event_s = time.monotonic()

    def sleep_until(self, deadline_s: float, is_over: Callable[[], bool]) -> None:
        """Dispatch events until `deadline_s` (CLOCK_MONOTONIC), until `is_over` returns True, or
        until the scheduler is woken."""
        while (left_s := deadline_s - time.monotonic()) > 0:
            if is_over():
                return
            wait_s = min(left_s, self._max_sleep_s())
            wait_ms = int(wait_s * 1000) + 1
            delay_ms = int(1000 * self._scheduler.event_delay_s(self.gap_s))
            if self._events.wait(wait_ms, self._scheduler.fds, delay_ms):
                if self._scheduler.is_woken():
                    return
                self.poll()
                time.sleep(min(self.gap_s, max(0.0, deadline_s - time.monotonic())))
            elif wait_s < left_s:
                self._update_unwinder()
                self._scheduler.between_ticks()

    def poll_starting(self, timeout_ms: int) -> None:
        """Wait for events before all collectors have started, and dispatch them. Lost events need
        no resync yet: a collector that starts reads the state of all processes anyway."""
        if self._events.wait(timeout_ms):
            events = self._events.drain()
            for listener in self._listeners:
                listener.on_process_events(events)
        self._unwinding.update()

    def poll_paused(self) -> None:
        """Wait for events for `PAUSED_WAIT_MS` at most, and dispatch them."""
        if self._events.wait(PAUSED_WAIT_MS):
            self.poll()
            time.sleep(EVENT_GAP_S)

    def poll(self) -> None:
        """Dispatch process events, and load what walks ask for into the kernel."""
        self.dispatch()
        self._update_unwinder()

    def dispatch(self) -> None:
        """Dispatch process events; resync where some were lost."""
        events = self._events.drain()
        began_s = time.thread_time()
        self._hand_on(events)
        self._events.charge(time.thread_time() - began_s)
        if self._resyncs.is_due(time.monotonic()):
            began_s = time.thread_time()
            self._resync()
            self._resyncs.done(time.monotonic(), time.thread_time() - began_s)

    def _hand_on(self, events: Sequence[ProcessEvent]) -> None:
        """Hand events to all that listen, and processes to be read where some were left out."""
        for collector in self._first:
            collector.on_process_events(events)
        unseen = self._events.unseen(MAX_UNSEEN)
        if not events and not unseen and self._events.lost == self._lost_before:
            return
        self._last_event_s = time.monotonic()
        for listener in self._listeners:
            listener.on_process_events(events)
        for listener in (*self._listeners, *self._first) if unseen else ():
            listener.on_processes_unseen(unseen)
        if not self._names_code:
            ignore_mappings(self._events, self._collectors)
        if self._events.lost > self._lost_before:
            self._lost_before = self._events.lost
            self._follow_given()
            self._resyncs.lost()

    def _resync(self) -> None:
        """Have all listeners read the present state of processes."""
        for listener in (*self._listeners, *self._first):
            listener.on_events_lost()

    def _follow_given(self, *, is_patient: bool = False) -> None:
        """Name the given processes to the stream of events: before any event is read, and again
        where some were lost, as forks may be among them."""
        if self._config.pids is not None:
            self._given = procfs.family(self._config.pids, is_patient=is_patient)
            self._events.follow(list(self._given))

    def _update_unwinder(self) -> None:
        if self._unwinding.update():
            self._last_event_s = time.monotonic()

    def _max_sleep_s(self) -> float:
        """How long to sleep at most while no process event comes."""
        is_charged = any(it.is_charged for it in self._collectors)
        if self._scheduler.fds:
            return self._config.tick_s if is_charged else self._config.rest_s
        if self._unwinding.is_busy:
            return BUSY_GAP_S
        if self.is_idle:
            return math.inf
        if not self._takes_stacks:
            return STACKLESS_REQUESTS_S if self._names_code or is_charged else math.inf
        is_quiet = time.monotonic() >= self._last_event_s + QUIET_AFTER_S
        return math.inf if is_quiet else WALK_REQUESTS_S
