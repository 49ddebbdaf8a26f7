# SPDX-License-Identifier: Apache-2.0
"""Walks of one process, without the rest of the agent."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from sonde.collect.cpu import CpuSampler
from sonde.collect.kernel import Kernel
from sonde.resolve import Resolver
from sonde.unwind import Unwinder
from sonde.unwind.table_cache import TableCache

HZ = 997
Walk = tuple[int, list[int], list[int], int]
"""(id, addresses in the kernel, words of user code, why it ended)."""


class Watch:
    """The on-CPU sampler and an unwinder over one process, without the rest of the agent."""

    def __init__(
        self,
        pid: int,
        folder: Path,
        room_bytes: int | None = None,
        constants: dict[str, int] | None = None,
    ) -> None:
        self.kernel = Kernel([pid])
        self.kernel._constants |= constants or {}
        self.sampler = CpuSampler(self.kernel, HZ)
        self.resolver = Resolver(grace_ns=10**10)
        self.resolver.start()
        self.cache = TableCache(folder)
        self.unwinder = Unwinder(self.kernel.unwind, self.resolver, self.cache)
        if room_bytes:
            self.unwinder.limit(room_bytes)

    def settle(self, pid: int, patience_s: float = 10) -> None:
        self.unwinder.expect([pid])
        until_s = time.monotonic() + patience_s
        while self.unwinder.is_busy and time.monotonic() < until_s:
            self.unwinder.update()
            time.sleep(0.01)

    def sample(self, seconds: float = 0.5) -> dict[int, Walk]:
        """Stacks by id, as the kernel has them."""
        self.sampler.start()
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self.unwinder.update()
            time.sleep(0.02)
        self.sampler.stop()
        batch = self.sampler.drain(0, True)
        return self.walks(batch.stacks)

    def walks(self, stacks: Iterable[int]) -> dict[int, Walk]:
        """(id, addresses in the kernel, words of user code, why it ended) by id."""
        kept = self.kernel.walks(list(stacks))
        return {it.id: (it.id, it.kernel, it.user, it.stop) for it in kept}

    def close(self) -> None:
        self.unwinder.close()
        self.resolver.close()
