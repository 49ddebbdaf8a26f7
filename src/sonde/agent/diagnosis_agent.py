# SPDX-License-Identifier: Apache-2.0
"""The agent that diagnoses: it keeps no rows, and hands those of each tick to an observer.

Its cost follows what happens on the machine. What processes use is counted by the kernel for all of
them, and read at each tick. Stacks are taken and waits counted of chosen processes alone: those
that use so much of a CPU that a slowdown would matter. Where there is none, ticks are far apart.
Frames get names in a bounded share of the time, after the observer has seen the rows.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from sonde.agent.agent import Agent
from sonde.agent.protocols import Observer
from sonde.agent.scheduler import Scheduler
from sonde.collect.collector import Batch, ProcessKey
from sonde.config import Config
from sonde.errors import SondeError
from sonde.model.process import Process

NAMING_SHARE: Final = 0.02
"""Share of a CPU that naming frames may take in the long run."""
NAMING_BURST_S: Final = 0.3
"""CPU time that it may take at once (the size of the token bucket)."""
REST_S: Final = 2.0
"""Between ticks while no process is chosen."""
CALM_S: Final = 0.5
"""Between ticks while the observer is calm, at least."""
CODE_TRUST_NS: Final = 10_000_000_000
"""How long a code object of Python is used without reading it again. Stacks of a second or more are
compared, and a check costs as much as a name."""
NAMED_AT_ONCE: Final = 8
"""Stacks that are named before the CPU time of that is read."""
EVENT_GAP_S: Final = 0.1
"""After some process events were read, the event loop sleeps at least this long."""
EVENT_DELAY_S: Final = 0.25
"""How long process events that are not urgent may stay unread."""
FULL_DRAIN_NS: Final = 5_000_000_000
"""Between drains that read everything (`to_the_end`), however much that costs."""
SUSPECTING_NS: Final = 500_000_000
"""The same while the observer suspects something."""
HOUSEKEEPING_NS: Final = 1_000_000_000
"""How often names of ended processes are dropped and losses counted."""
CALM_HOUSEKEEPING_NS: Final = 4_000_000_000
"""The same while the observer is calm."""
MAX_FAILURES: Final = 20
"""Failed ticks in a row: then the cause is not the rows of one tick, and the agent ends. Also the
kinds of failures that are logged."""


class DiagnosisScheduler(Scheduler):
    """A tick each `tick_s` while something is chosen, each `CALM_S` while the observer is calm, and
    each `rest_s` where nothing is chosen."""

    def __init__(self, tick_s: float, rest_s: float = REST_S) -> None:
        self.fds: list[int] = []
        self._tick_s = tick_s
        self._rest_s = max(tick_s, rest_s)
        self.is_idle = False
        """Whether no process is chosen."""
        self.is_calm = False
        """Whether the observer is calm."""

    @property
    def tick_s(self) -> float:
        """From the last tick to the next one."""
        if self.is_idle:
            return self._rest_s
        return max(CALM_S, self._tick_s) if self.is_calm else self._tick_s

    def is_woken(self) -> bool:
        """Never: a process is noticed only after seconds, so the next tick is always in time."""
        return False

    def on_tick(self, batches: Sequence[Batch], elapsed_s: float) -> None:
        """Nothing: the agent sets `is_idle` itself."""

    def event_delay_s(self, gap_s: float) -> float:
        """They are read with the ticks, and when a process maps a file."""
        return EVENT_DELAY_S


class DiagnosisAgent(Agent):
    """Observes this node for one observer."""

    def __init__(self, config: Config, log: Callable[[str], None]) -> None:
        """`log` is called with one line for each kind of failure. Raises HostError."""
        self._watch_scheduler = DiagnosisScheduler(config.tick_s)
        super().__init__(config, None, chooses=True)
        self._log = log
        self._event_loop.gap_s = EVENT_GAP_S
        self._dictionary.stacks.python.trust_ns = CODE_TRUST_NS
        self._observer: Observer | None = None
        self._naming_s = NAMING_BURST_S
        """CPU time that naming frames may take now."""
        self.failures = 0
        """Ticks that an error in Sonde kept from being handled whole."""
        self._failed_in_a_row = 0
        self._housekeeping_ns = 0
        self._full_drain_ns = 0
        self._logged: set[str] = set()

    def _make_scheduler(self) -> Scheduler:
        return self._watch_scheduler

    def observe(self, observer: Observer) -> None:
        """Set who sees the rows; to be called before `start`."""
        self._observer = observer

    def running(self, pid: int) -> Process:
        """The process that has this pid now, with its owner."""
        return self.process(pid, self._resolver.processes.start_of(pid))

    def _tick(self, chunk_ends: bool) -> None:
        try:
            self._watch()
            self._failed_in_a_row = 0
        except SondeError:
            raise
        except Exception as error:
            # Rows come from other programs: what one of them has in them must not end the agent.
            self.failures += 1
            self._failed_in_a_row += 1
            self.log_failure(error)
            if self._failed_in_a_row >= MAX_FAILURES:
                raise

    def log_failure(self, error: BaseException) -> None:
        """Log a failure, each kind once and `MAX_FAILURES` kinds at most: what it was and where, on
        one line."""
        text = summary_of(error)
        if text not in self._logged and len(self._logged) < MAX_FAILURES:
            self._logged.add(text)
            self._log(text)

    def _watch(self) -> None:
        """One tick: drain, let the observer see the rows, choose processes, name stacks."""
        assert self._observer is not None
        since_ns = self._advance()
        is_full = self._is_full_due()
        batches = [
            collector.drain(since_ns, is_full or collector.reports_ongoing)
            for collector in self._collectors
        ]
        self._event_loop.poll()  # processes may have come and gone meanwhile
        for batch in batches:
            if batch.notes or batch.groups:
                self._resolver.add_notes(batch.notes, batch.groups)
        for collector, batch in zip(self._collectors, batches, strict=True):
            self._counts[collector.name] += batch.seen
        try:
            self._observer.on_tick(since_ns, self._tick_ns, batches)
        finally:
            self._kernel.choose(self._observer.chosen())
            self._name(batches, (self._tick_ns - since_ns) / 1e9)
        self._watch_scheduler.is_idle = not self._kernel.has_chosen
        self._event_loop.is_idle = self._watch_scheduler.is_idle
        self._watch_scheduler.is_calm = is_calm = self._observer.is_calm()
        passed_ns = self._tick_ns - self._housekeeping_ns
        if passed_ns >= (CALM_HOUSEKEEPING_NS if is_calm else HOUSEKEEPING_NS):
            self._housekeeping_ns = self._tick_ns
            self._resolver.tick(self._tick_ns)
            self._count_losses()

    def _is_full_due(self) -> bool:
        """Whether collectors are to read everything now, however much it costs: above all
        connections, which are otherwise scanned the more rarely, the more there are."""
        assert self._observer is not None
        passed_ns = self._tick_ns - self._full_drain_ns
        if passed_ns < (SUSPECTING_NS if self._observer.suspects() else FULL_DRAIN_NS):
            return False
        self._full_drain_ns = self._tick_ns
        return True

    def _name(self, batches: Iterable[Batch], passed_s: float) -> None:
        """Name stacks, those first that are worth most to the observer, while there is CPU time for
        it."""
        assert self._observer is not None
        self._naming_s = min(NAMING_BURST_S, self._naming_s + NAMING_SHARE * passed_s)
        worth = self._observer.worth
        wanted: list[tuple[float, int, ProcessKey]] = []
        if self._naming_s > 0:
            for batch in batches:
                for stack_id, who in batch.stacks.items():
                    if value := worth(who[0], stack_id):
                        wanted.append((value, stack_id, who))
        if wanted:
            began_s = time.thread_time()
            left = iter(sorted(wanted, reverse=True))
            while self._naming_s > 0 and (some := list(islice(left, NAMED_AT_ONCE))):
                self._dictionary.name({stack_id: who for _, stack_id, who in some})
                now_s = time.thread_time()
                self._naming_s, began_s = self._naming_s - (now_s - began_s), now_s
        for batch in batches:
            self._dictionary.ignore(batch)


def summary_of(error: BaseException) -> str:
    """What went wrong and where (the last four calls), on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames[-4:]]
    return f"{type(error).__name__}: {error} ({' > '.join(where)})"
