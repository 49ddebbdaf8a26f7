# SPDX-License-Identifier: Apache-2.0
"""How often rows are read out where nobody keeps them: as often as somebody asks.

An agent without a capture lets out the last value of each series. What it reads between two
questions is seen by no one, so it reads when it is asked, and at the pace of those who ask: each
`tick_s` where a page is fetched that often, each `rest_s` where it is not. Totals are exact either
way. It does not wait for a question alone: what the kernel keeps for it is bounded.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections.abc import Callable, Sequence, Sized

from sonde.agent.registry import fills_rings
from sonde.agent.scheduler import Scheduler
from sonde.collect.collector import Batch, Collector
from sonde.config import Config

ANSWERED_S = 1.0
"""Who asks waits no longer than this for what is new."""
GAPS = 2
"""Between questions, of which the longest counts: two who ask may ask one soon after the other."""
LEFT_AFTER = 3
"""After this many gaps without a request the requester is gone."""
CROWDED = 1_024
"""Rows of one table, a quarter of what the smallest map of the kernel's holds."""
CROWDED_SPANS = 3_600
"""A quarter of what its ring holds."""


class ScrapeScheduler(Scheduler):
    """A tick for each scrape, and for want of scrapes each `rest_s`."""

    def __init__(
        self,
        config: Config,
        collectors: Sequence[Collector],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._tick_s = config.tick_s
        self._rest_s = config.rest_s
        self._collectors = collectors
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waker = select.poll()
        self._waker.register(self._fd, select.POLLIN)
        self.fds = [self._fd]
        """Descriptors that have something to read when somebody asks."""
        self._lock = threading.Lock()
        self._answered = threading.Event()
        self._asked_s = float("-inf")
        self._gaps = [float("inf")] * GAPS
        self._judged_s = float("-inf")
        self._crowded = False
        self._reported_s = -1.0
        self._open = True

    @staticmethod
    def suits(config: Config) -> bool:
        """Whether this configuration takes nothing that has to be read often: stacks and what
        attached libraries record fills their rings."""
        takes = fills_rings(config) or config.device_time != "off"
        return config.rest_s > config.tick_s and not takes

    @property
    def tick_s(self) -> float:
        """From the last tick to the next one, unless `is_woken` before."""
        within_s = min((it.drain_within_s for it in self._collectors), default=math.inf)
        if self._crowded or self._is_active() or math.isfinite(within_s):
            return min(self._tick_s, within_s)
        return self._wanted_s()

    def _is_active(self) -> bool:
        """Whether something fills a buffer."""
        return any(it.is_active for it in self._collectors)

    def event_delay_s(self, gap_s: float) -> float:
        """As long as nothing is urgent, they are read once in each gap."""
        return 0.0 if self._is_active() else gap_s

    def between_ticks(self) -> None:
        """Charge what observing costs: a tick may be far."""
        for collector in self._collectors:
            if collector.is_charged:
                collector.charge()

    def _wanted_s(self) -> float:
        gap_s = max(self._gaps)
        if self._clock() - self._asked_s > LEFT_AFTER * gap_s:
            return self._rest_s
        return max(self._tick_s, min(self._rest_s, gap_s))

    def request_tick(self) -> None:
        """A scrape: wait until what is new was read, unless that was just done."""
        now_s = self._clock()
        with self._lock:
            self._gaps = [*self._gaps[1:], now_s - self._asked_s]
            self._asked_s = now_s
            if not self._open or now_s - self._judged_s < self._tick_s / 2:
                return
            self._answered.clear()
            os.eventfd_write(self._fd, 1)
        self._answered.wait(ANSWERED_S)

    def is_woken(self) -> bool:
        """Whether somebody scrapes."""
        return bool(self._waker.poll(0))

    def on_tick(self, batches: Sequence[Batch], elapsed_s: float) -> None:
        """A tick is over: scrapes that waited go on. Read more often where there was so much that
        the kernel might not keep all of it."""
        most = max((batch.most_rows() for batch in batches), default=0)
        parts = [part["tid"] for batch in batches for part in batch.spans]
        spans = sum(len(column) for column in parts if isinstance(column, Sized))
        full = max(most / CROWDED, spans / CROWDED_SPANS)
        self._crowded = full * self._rest_s > max(elapsed_s, self._tick_s)
        rest_s = self._wanted_s() if self._wanted_s() > self._tick_s else 0.0
        if rest_s != self._reported_s:
            self._reported_s = rest_s
            for collector in self._collectors:
                collector.set_interval(rest_s, keep_last_only=True)
        with self._lock:
            self._judged_s = self._clock()
            if self.is_woken():
                os.eventfd_read(self._fd)
            self._answered.set()

    def close(self) -> None:
        """No scrape is to wait any more."""
        with self._lock:
            self._open = False
            self._answered.set()
