# SPDX-License-Identifier: Apache-2.0
"""How often rows are read out: each `tick_s` while the machine works, each `rest_s` while it rests.

Waking up, with cold caches, is most of what an agent costs on a machine that does nothing. So after
`TICKS_TO_REST` ticks in which next to nothing was used, the agent sleeps longer. The BPF timer that
samples the run queues wakes it as soon as a program works (collect.queues): from then on rows are
read each `tick_s` again. Totals are exact either way; at rest they are of longer intervals.

In a recording of given processes the first ticks come sooner, each interval twice as long as the
one before. Names of Python code are read from the memory of a process while it lives: a program
that runs for less than `tick_s` would have none.
"""

from __future__ import annotations

import select
from collections.abc import Iterable, Sequence

from sonde.agent.registry import fills_rings
from sonde.agent.scheduler import Scheduler
from sonde.collect.collector import Batch, Collector
from sonde.config import Config
from sonde.model.rows import ActivityRow, UsageRow

REST_SHARE = 0.1
"""A machine is at rest where all processes together use less than this share of one core. It is
far below the load that wakes the agent (BUSY_STIRS in bpf/queues.bpf.c), so that the agent does not
fall asleep and wake up in turn."""
TICKS_TO_REST = 2
"""Idle ticks in a row before the agent sleeps longer."""
OTHERS_DELAY_S = 0.005
"""In a recording of given processes: how long events of other processes stay unread."""
FIRST_TICK_S = 0.05
"""In a recording of given processes: the first interval."""


class AdaptiveScheduler(Scheduler):
    """A tick each `tick_s`; each `rest_s` on a machine that does nothing."""

    def __init__(self, config: Config, collectors: Sequence[Collector]) -> None:
        self._tick_s = config.tick_s
        self._rest_s = config.rest_s
        self._delays_events = config.pids is not None
        self._first_tick_s = FIRST_TICK_S if config.pids is not None else config.tick_s
        """Upper limit of the interval at the start, doubled at each tick up to `tick_s`."""
        self._collectors = collectors
        self._waker: Collector | None = next((it for it in collectors if it.can_wake), None)
        self._can_rest = (
            config.rest_s > config.tick_s
            and config.host_metrics
            and self._waker is not None  # else nothing would wake the agent
            and config.pids is None
            and not fills_rings(config)
        )
        self._idle_ticks = 0
        self._wakeup: select.poll | None = None
        self.fds: list[int] = []
        """Descriptors that have something to read when the machine is no longer at rest."""

    @property
    def tick_s(self) -> float:
        """From the last tick to the next one, unless `is_woken` before."""
        return self._rest_s if self.fds else min(self._tick_s, self._first_tick_s)

    def is_woken(self) -> bool:
        """Whether the machine is idle no more."""
        return self._wakeup is not None and bool(self._wakeup.poll(0))

    def event_delay_s(self, gap_s: float) -> float:
        """In a recording of given processes, events of others wait: they are read, not acted on."""
        return OTHERS_DELAY_S if self._delays_events else 0.0

    def on_tick(self, batches: Sequence[Batch], elapsed_s: float) -> None:
        """Begin to sleep longer, or stop that, by what was seen since the last tick."""
        if self._first_tick_s < self._tick_s:
            self._first_tick_s *= 2
        if not self._can_rest or elapsed_s <= 0:
            return
        is_idle = not self.is_woken() and _is_idle(batches, elapsed_s)
        self._idle_ticks = self._idle_ticks + 1 if is_idle else 0
        if self.fds and not is_idle:
            self.reset()
        elif not self.fds and self._idle_ticks >= TICKS_TO_REST:
            self._rest()

    def reset(self) -> None:
        """Sleep no longer than `tick_s`."""
        if self._waker is None or not self.fds:
            return
        self._waker.disarm_wakeup()
        self.fds, self._wakeup, self._idle_ticks = [], None, 0
        for collector in self._collectors:
            collector.set_interval(0.0)

    def _rest(self) -> None:
        """Sleep `rest_s` from now on, unless the kernel cannot wake the agent."""
        fd = self._waker.arm_wakeup() if self._waker is not None else None
        if fd is None:
            return
        self.fds = [fd]
        self._wakeup = select.poll()
        self._wakeup.register(fd, select.POLLIN)
        for collector in self._collectors:
            collector.set_interval(self._rest_s)


def _is_idle(batches: Iterable[Batch], elapsed_s: float) -> bool:
    used_ns = 0
    for batch in batches:
        if batch.spans or "device_run" in batch.rows or _has_device_call(batch):
            return False
        used_ns += sum(row.cpu_ns for row in batch.records(UsageRow))
    return used_ns < REST_SHARE * elapsed_s * 1e9


def _has_device_call(batch: Batch) -> bool:
    return any(row.kind == "device" for row in batch.records(ActivityRow))
