# SPDX-License-Identifier: Apache-2.0
"""What is known of a process whose device time is read, and what finding one may cost."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from sonde import procfs
from sonde.collect import inject_abi as abi
from sonde.collect.collector import ProcessKey
from sonde.collect.governor import Governor
from sonde.collect.inject_memory import InjectMemory
from sonde.collect.inject_records import Ring
from sonde.collect.libraries import FIRST_BYTES
from sonde.collect.ring_budget import Allowance

MOST_STREAMS: Final = 4_096
FIND_SHARE: Final = 0.05
"""Of a CPU, for looking through the mappings of processes."""
FIND_CREDIT_S: Final = 0.5
"""CPU time for that which can be saved up."""


@dataclass(slots=True)
class DeviceProcess:
    """One process with our library in it."""

    memory: InjectMemory
    ring: Ring
    key: ProcessKey
    before: dict[str, int]
    own_tids: bool
    """Threads have the same numbers there and here."""
    governor: Governor
    stacks: abi.Request
    """Who takes the stacks of launches: the kernel (SITE), or the library by frame pointers."""
    streams: dict[int, int] = field(default_factory=dict)
    taken: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Stack ids by the launch's number."""
    told: abi.Reason = abi.Reason.OK
    armed_ns: int = 0
    """Since when its launches are chosen, as last reported."""
    party: int = 0
    allowance: Allowance = field(default_factory=Allowance)
    head: int = 0
    """Of its ring, as read last."""
    lost: int = 0
    """Records that were lost and not reported yet."""
    lost_told_ns: int = 0

    def allowed(self, seconds: float) -> int:
        """Records that may be read of it now, so long after the last time."""
        with_stacks = self.stacks == abi.Request.STACKS
        return self.allowance.earn(self.governor.per_second, seconds, with_stacks=with_stacks)

    def stream(self, handle: int) -> int:
        """A small number for a stream; addresses are nobody's business."""
        if not handle:
            return 0
        if handle not in self.streams and len(self.streams) >= MOST_STREAMS:
            return 0
        return self.streams.setdefault(handle, len(self.streams) + 1)


class Finder:
    """Finds the library's memory in processes, some of which may make that take long."""

    def __init__(self) -> None:
        self._credit_s = FIND_CREDIT_S
        self._credited_s = time.monotonic()

    @property
    def is_free(self) -> bool:
        """Whether there is CPU time left for what can wait."""
        now_s = time.monotonic()
        earned_s = FIND_SHARE * (now_s - self._credited_s)
        self._credit_s = min(FIND_CREDIT_S, self._credit_s + earned_s)
        self._credited_s = now_s
        return self._credit_s > 0

    def find(self, pid: int) -> InjectMemory | None:
        """See InjectMemory.find. Mappings of common length are looked through at any time."""
        most_bytes = procfs.MAX_MAPS_BYTES if self.is_free else FIRST_BYTES
        began_s = time.thread_time()
        try:
            return InjectMemory.find(pid, most_bytes)
        finally:
            self._credit_s -= time.thread_time() - began_s
