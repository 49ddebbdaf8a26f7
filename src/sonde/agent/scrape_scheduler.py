# SPDX-License-Identifier: Apache-2.0
"""How often collectors are drained where no rows are kept: as often as metrics are scraped.

An agent without a capture exports the last value of each series. Values between two scrapes are
seen by no one, so it drains for each scrape, and besides at the interval of the scrapes: `tick_s`
at least, `rest_s` at most. Totals are exact either way. It does not wait for scrapes alone, because
the kernel's buffers are bounded.
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

MAX_WAIT_S = 1.0
"""A scrape waits no longer than this for a tick."""
GAPS = 2
"""Gaps between scrapes that are remembered; the longest counts, as two scrapers may come one soon
after the other."""
LEFT_AFTER = 3
"""After this many gaps without a scrape, the scraper is gone."""
CROWDED_ROWS = 1_024
"""Rows of one table in a drain: a quarter of what the smallest BPF map holds."""
CROWDED_SPANS = 3_600
"""Spans in a drain: a quarter of what their ring holds."""


class ScrapeScheduler(Scheduler):
    """A tick for each scrape, and at least one each `rest_s`."""

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
        """Readable while a scrape waits for a tick."""
        self._lock = threading.Lock()
        self._ticked = threading.Event()
        """Set by each tick."""
        self._scraped_s = float("-inf")
        """When the last scrape came, by `clock`."""
        self._gaps = [float("inf")] * GAPS
        self._ticked_s = float("-inf")
        """When the last tick ended."""
        self._crowded = False
        """The kernel's buffers might be full after `rest_s`."""
        self._set_interval_s = -1.0
        """What was set at collectors last."""
        self._open = True

    @staticmethod
    def suits(config: Config) -> bool:
        """Whether this configuration has no collector whose rings fill up fast: those of stacks,
        and of the injected library."""
        has_rings = fills_rings(config) or config.device_time != "off"
        return config.rest_s > config.tick_s and not has_rings

    @property
    def tick_s(self) -> float:
        """From the last tick to the next one, unless `is_woken` before."""
        within_s = min((it.drain_within_s for it in self._collectors), default=math.inf)
        if self._crowded or self._is_active() or math.isfinite(within_s):
            return min(self._tick_s, within_s)
        return self._scrape_interval_s()

    def _is_active(self) -> bool:
        """Whether something fills a buffer."""
        return any(it.is_active for it in self._collectors)

    def event_delay_s(self, gap_s: float) -> float:
        """Where no collector fills a buffer, they are read once in `gap_s`."""
        return 0.0 if self._is_active() else gap_s

    def between_ticks(self) -> None:
        """Hold costs against the budgets of collectors: the next tick may be far."""
        for collector in self._collectors:
            if collector.is_charged:
                collector.charge()

    def _scrape_interval_s(self) -> float:
        """The interval of ticks that follows from the scrapes."""
        gap_s = max(self._gaps)
        if self._clock() - self._scraped_s > LEFT_AFTER * gap_s:
            return self._rest_s
        return max(self._tick_s, min(self._rest_s, gap_s))

    def request_tick(self) -> None:
        """A scrape: wait until a tick is over, unless one was less than `tick_s` / 2 ago."""
        now_s = self._clock()
        with self._lock:
            self._gaps = [*self._gaps[1:], now_s - self._scraped_s]
            self._scraped_s = now_s
            if not self._open or now_s - self._ticked_s < self._tick_s / 2:
                return
            self._ticked.clear()
            os.eventfd_write(self._fd, 1)
        self._ticked.wait(MAX_WAIT_S)

    def is_woken(self) -> bool:
        """Whether a scrape waits for a tick."""
        return bool(self._waker.poll(0))

    def on_tick(self, batches: Sequence[Batch], elapsed_s: float) -> None:
        """A tick is over: scrapes that waited go on. The next ticks come sooner where there were so
        many rows that the kernel's buffers might get full."""
        most = max((batch.most_rows() for batch in batches), default=0)
        parts = [part["tid"] for batch in batches for part in batch.spans]
        spans = sum(len(column) for column in parts if isinstance(column, Sized))
        full = max(most / CROWDED_ROWS, spans / CROWDED_SPANS)
        self._crowded = full * self._rest_s > max(elapsed_s, self._tick_s)
        rest_s = self._scrape_interval_s() if self._scrape_interval_s() > self._tick_s else 0.0
        if rest_s != self._set_interval_s:
            self._set_interval_s = rest_s
            for collector in self._collectors:
                collector.set_interval(rest_s, keep_last_only=True)
        with self._lock:
            self._ticked_s = self._clock()
            if self.is_woken():
                os.eventfd_read(self._fd)
            self._ticked.set()

    def close(self) -> None:
        """End the waits of scrapes."""
        with self._lock:
            self._open = False
            self._ticked.set()
