# SPDX-License-Identifier: Apache-2.0
"""How often rows are read out where nobody keeps them: as often as somebody asks.

An agent without a capture lets out the last value of each series. What it reads between two
questions is seen by no one, so it reads when it is asked, and at the pace of those who ask: each
`tick_s` where a page is fetched that often, each `rest_s` where it is not. Totals are exact either
way. It does not wait for a question alone: what the kernel keeps for it is bounded.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence, Sized

from sonde.collect.collector import Batch, Collector
from sonde.collect.device_time import DeviceTime
from sonde.collect.metrics import Metrics
from sonde.collect.queues import QueueCollector
from sonde.config import Config

ANSWERED_S = 1.0
"""Who asks waits no longer than this for what is new."""
GAPS = 2
"""Between questions, of which the longest counts: two who ask may ask one soon after the other."""
LEFT_AFTER = 3
"""So many gaps without a question, and whoever asked is gone."""
CROWDED = 1_024
"""Rows of one table, a quarter of what the smallest map of the kernel's holds."""
TRY_S = 0.25
"""For so long switches are followed again, to see whether they are still too many."""
CROWDED_SPANS = 3_600
"""A quarter of what its ring holds."""


class Demand:
    """Says when the next tick is due; `ask` is for other threads."""

    def __init__(
        self,
        config: Config,
        collectors: Sequence[Collector],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._tick_s = config.tick_s
        self._rest_s = config.rest_s
        self._metrics = [it for it in collectors if isinstance(it, Metrics)]
        self._queues = [it for it in collectors if isinstance(it, QueueCollector)]
        self._device_time = [it for it in collectors if isinstance(it, DeviceTime)]
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
        self._told_s = -1.0
        self._open = True

    @staticmethod
    def suits(config: Config) -> bool:
        """Whether this configuration takes nothing that has to be read often: stacks and what
        attached libraries tell fill their rings."""
        takes = config.on_cpu or config.off_cpu or config.memory or config.syscalls
        return config.rest_s > config.tick_s and not takes and config.device_time == "off"

    @property
    def tick_s(self) -> float:
        """Until the next tick, unless `is_stirred` before."""
        if any(queues.is_trying for queues in self._queues):
            return min(self._tick_s, TRY_S)
        if self._crowded or self.is_hurried:
            return self._tick_s
        return self._wanted_s()

    @property
    def is_hurried(self) -> bool:
        """Whether some process carries Sonde's library: it fills a ring."""
        return any(it.is_carried for it in self._device_time)

    def _wanted_s(self) -> float:
        gap_s = max(self._gaps)
        if self._clock() - self._asked_s > LEFT_AFTER * gap_s:
            return self._rest_s
        return max(self._tick_s, min(self._rest_s, gap_s))

    def ask(self) -> None:
        """Somebody wants to know: wait until what is new was read, unless that was just done."""
        now_s = self._clock()
        with self._lock:
            self._gaps = [*self._gaps[1:], now_s - self._asked_s]
            self._asked_s = now_s
            if not self._open or now_s - self._judged_s < self._tick_s / 2:
                return
            self._answered.clear()
            os.eventfd_write(self._fd, 1)
        self._answered.wait(ANSWERED_S)

    def is_stirred(self) -> bool:
        """Whether somebody asks."""
        return bool(self._waker.poll(0))

    def judge(self, batches: Sequence[Batch], elapsed_s: float) -> None:
        """A tick is over: who asks may look. Read more often where there was so much that the
        kernel might not keep all of it."""
        most = max((len(rows) for batch in batches for rows in batch.rows.values()), default=0)
        parts = [part["tid"] for batch in batches for part in batch.spans]
        spans = sum(len(column) for column in parts if isinstance(column, Sized))
        full = max(most / CROWDED, spans / CROWDED_SPANS)
        self._crowded = full * self._rest_s > max(elapsed_s, self._tick_s)
        rest_s = self._wanted_s() if self._wanted_s() > self._tick_s else 0.0
        if rest_s != self._told_s:
            self._told_s = rest_s
            for metrics in self._metrics:
                metrics.unkept(rest_s)
        with self._lock:
            self._judged_s = self._clock()
            if self.is_stirred():
                os.eventfd_read(self._fd)
            self._answered.set()

    def go_on(self) -> None:
        """Nothing: it never stopped."""

    def close(self) -> None:
        """Nobody is to wait any more."""
        with self._lock:
            self._open = False
            self._answered.set()
