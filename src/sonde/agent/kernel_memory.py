# SPDX-License-Identifier: Apache-2.0
"""How much kernel memory the BPF maps of a recording take, measured by loading its BPF programs,
which are attached to nothing and freed again."""

from __future__ import annotations

from sonde import apis
from sonde.agent.unwinding import MAX_KERNEL_BYTES
from sonde.collect.cpu import CpuSampler
from sonde.collect.device_calls import DeviceCalls
from sonde.collect.kernel import Kernel
from sonde.collect.waits import WaitCollector
from sonde.config import Config


def kernel_memory() -> tuple[int, int]:
    """(bytes of BPF maps before any unwind table, bytes at most with them). Raises HostError."""
    config = Config()
    kernel = Kernel(None)
    collectors = (
        CpuSampler(kernel, config.hz),
        WaitCollector(kernel, span_min_ns=10**7, stack_gap_ns=10**7),
        DeviceCalls(kernel, apis.load(), launches=False, budget=config.probe_budget),
    )
    held = kernel.memory_bytes() + sum(it.memory_bytes() for it in collectors)
    return held, MAX_KERNEL_BYTES
