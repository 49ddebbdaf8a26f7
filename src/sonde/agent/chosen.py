# SPDX-License-Identifier: Apache-2.0
"""Which collectors a configuration asks for."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from sonde import apis
from sonde.agent import signals
from sonde.collect.blocks import BlockCollector
from sonde.collect.collector import Collector
from sonde.collect.cpu import CpuSampler
from sonde.collect.device_calls import DeviceCalls
from sonde.collect.device_time import DeviceTime
from sonde.collect.flows import FlowCollector
from sonde.collect.kernel import Kernel
from sonde.collect.launch_sites import LaunchSites
from sonde.collect.memory import MemoryCollector
from sonde.collect.metrics import Metrics
from sonde.collect.queues import QueueCollector
from sonde.collect.syscalls import SyscallCollector
from sonde.collect.tasks import TaskCollector
from sonde.collect.waits import WaitCollector
from sonde.config import Config
from sonde.errors import HostError


@dataclass(frozen=True, slots=True)
class Chosen:
    """The collectors of a node; those that more is asked of than rows by their names, too."""

    calls: DeviceCalls | None
    device_time: DeviceTime | None
    all: list[Collector]


def collectors_of(config: Config, kernel: Kernel, *, privileged: bool) -> Chosen:
    """Loaded, not started. `privileged`: False for a user to whom the kernel tells nothing.

    Raises HostError where this machine cannot.
    """
    calls = device_time = None
    if config.device_calls and privileged:
        calls = DeviceCalls(
            kernel, apis.load(), launches=config.launches, budget=config.probe_budget
        )
    if config.injected:
        sites = None
        if privileged:
            with suppress(HostError):  # then stacks are the library's own
                sites = LaunchSites(kernel)
        device_time = DeviceTime(config.pids, config.device_budget, sites)
    collectors = _of_code(config, kernel) if privileged else []
    if calls is not None:
        collectors.append(calls)
    if privileged:
        collectors += _of_host(config, kernel)
    if device_time is not None:
        collectors.append(device_time)
    if runners := signals.runners(config):
        collectors.append(Metrics(runners))
    return Chosen(calls, device_time, collectors)


def _of_code(config: Config, kernel: Kernel) -> list[Collector]:
    collectors: list[Collector] = []
    if config.on_cpu:
        collectors.append(CpuSampler(kernel, config.hz))
    if config.off_cpu:
        collectors.append(
            WaitCollector(
                kernel,
                span_min_ns=int(config.wait_span_ms * 1e6),
                stack_gap_ns=int(config.stack_gap_ms * 1e6),
            )
        )
    return collectors


def _of_host(config: Config, kernel: Kernel) -> list[Collector]:
    collectors: list[Collector] = []
    if config.host_metrics:
        collectors += [TaskCollector(kernel), BlockCollector(kernel), FlowCollector(kernel)]
        if config.host_hz:
            collectors.append(QueueCollector(kernel, config.host_hz))
    if config.syscalls:
        collectors.append(SyscallCollector(kernel))
    if config.memory:
        gap_ns = int(config.stack_gap_ms * 1e6)
        collectors.append(MemoryCollector(kernel, stack_gap_ns=gap_ns))
    return collectors
