# SPDX-License-Identifier: Apache-2.0
"""Walks of one process, without the rest of the agent."""

from __future__ import annotations

import time

from sonde.collect.cpu import CpuSampler
from sonde.collect.kernel import Kernel
from sonde.resolve import Resolver
from sonde.unwind import Unwinder
from sonde.unwind.table_cache import TableCache

HZ = 997


class Watch:
    """The on-CPU sampler and an unwinder over one process, without the rest of the agent."""

    def __init__(self, pid, folder, room_bytes=None, knobs=None):
        self.kernel = Kernel([pid])
        self.kernel._knobs |= knobs or {}
        self.sampler = CpuSampler(self.kernel, HZ)
        self.resolver = Resolver(grace_ns=10**10)
        self.resolver.start()
        self.cache = TableCache(folder)
        self.unwinder = Unwinder(self.kernel.unwind, self.resolver, self.cache)
        if room_bytes:
            self.unwinder.limit(room_bytes)

    def settle(self, pid, patience_s=10):
        self.unwinder.expect([pid])
        until_s = time.monotonic() + patience_s
        while self.unwinder.is_busy and time.monotonic() < until_s:
            self.unwinder.update()
            time.sleep(0.01)

    def sample(self, seconds=0.5):
        """Stacks by id, as the kernel has them."""
        self.sampler.start()
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self.unwinder.update()
            time.sleep(0.02)
        self.sampler.stop()
        batch = self.sampler.drain(0, True)
        return self.walks(batch.stacks)

    def walks(self, stacks):
        """(id, addresses in the kernel, words of user code, why it ended) by id."""
        kept = self.kernel.walks(list(stacks))
        return {it.id: (it.id, it.kernel, it.user, it.stop) for it in kept}

    def close(self):
        self.unwinder.close()
        self.resolver.close()
