# SPDX-License-Identifier: Apache-2.0
"""Which collectors there are, and which of them a configuration asks for.

A new collector is one entry of `REGISTRY`: docs/design/collectors.md.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from sonde import apis
from sonde.agent import signals
from sonde.collect.collector import Collector
from sonde.collect.cpu import CpuSampler
from sonde.collect.device_calls import DeviceCalls
from sonde.collect.device_time import DeviceTime
from sonde.collect.kernel import BpfObject, Kernel
from sonde.collect.launch_sites import LaunchSites
from sonde.collect.metrics import Metrics
from sonde.collect.plain_files import PlainFiles
from sonde.collect.waiting_files import FileBudget
from sonde.collect.waits import WaitCollector
from sonde.config import Config
from sonde.errors import HostError


@dataclass(frozen=True, slots=True)
class Setup:
    """What the collectors of one agent are made from."""

    config: Config
    kernel: Kernel
    privileged: bool
    """False for a user whom the kernel lets load no BPF program and read no process events."""
    files_budget: FileBudget | None = None
    """CPU time that reading the files of a user or container may take; None: no limit."""
    plain_files: PlainFiles | None = None
    """Files of which it is known that they carry no device API."""
    polls_host: bool = True
    """Whether somebody reads the metrics of the machine that are polled."""

    @property
    def stack_gap_ns(self) -> int:
        """The least time between two stacks of one thread for one reason of waiting."""
        return int(self.config.stack_gap_ms * 1e6)

    @property
    def least_ns(self) -> int:
        """What a row of waits, or of what a process used, stands for at least."""
        return int(self.config.row_ms * 1e6)


@dataclass(frozen=True, slots=True)
class Registration:
    """One collector."""

    is_wanted: Callable[[Config], bool]
    make: Callable[[Setup], Collector]
    """Loads it, and does not start it. Raises HostError where this machine cannot."""
    bpf_object: Callable[[Setup], BpfObject] | None = None
    """The BPF object that it loads, so that other threads can load it ahead (`load_ahead`)."""
    needs_privilege: bool = True
    """It is left out where `Setup.privileged` is False."""
    fills_rings: bool = False
    """It takes stacks or single calls, whose rings have to be drained often: no rest."""


def _waits(setup: Setup) -> WaitCollector:
    span_min_ns = int(setup.config.wait_span_ms * 1e6)
    return WaitCollector(
        setup.kernel, span_min_ns=span_min_ns, stack_gap_ns=setup.stack_gap_ns,
        least_ns=setup.least_ns,
    )  # fmt: skip


def _waits_object(setup: Setup) -> BpfObject:
    span_min_ns = int(setup.config.wait_span_ms * 1e6)
    return WaitCollector.bpf_object(span_min_ns=span_min_ns, stack_gap_ns=setup.stack_gap_ns)


def _device_calls(setup: Setup) -> DeviceCalls:
    config = setup.config
    return DeviceCalls(
        setup.kernel, apis.load(), launches=config.launches, budget=config.probe_budget,
        pids=config.pids, files_budget=setup.files_budget, plain_files=setup.plain_files,
    )  # fmt: skip


def _device_time(setup: Setup) -> DeviceTime:
    sites = None
    if setup.privileged:
        with suppress(HostError):  # then the injected library takes the stacks itself
            sites = LaunchSites(setup.kernel, setup.files_budget)
    config = setup.config
    return DeviceTime(config.pids, config.device_budget, sites, has_events=setup.privileged)


# Collectors that few recordings need are imported where one does.


def _blocks(it: Setup) -> Collector:
    from sonde.collect.blocks import BlockCollector

    return BlockCollector(it.kernel)


def _blocks_object(_: Setup) -> BpfObject:
    from sonde.collect.blocks import BlockCollector

    return BlockCollector.bpf_object()


def _flows(it: Setup) -> Collector:
    from sonde.collect.flows import FlowCollector

    return FlowCollector(it.kernel)


def _flows_object(_: Setup) -> BpfObject:
    from sonde.collect.flows import FlowCollector

    return FlowCollector.bpf_object()


def _memory(it: Setup) -> Collector:
    from sonde.collect.memory import MemoryCollector

    return MemoryCollector(it.kernel, stack_gap_ns=it.stack_gap_ns)


def _memory_object(it: Setup) -> BpfObject:
    from sonde.collect.memory import MemoryCollector

    return MemoryCollector.bpf_object(stack_gap_ns=it.stack_gap_ns)


def _queues(it: Setup) -> Collector:
    from sonde.collect.queues import QueueCollector

    return QueueCollector(it.kernel, it.config.host_hz)


def _queues_object(it: Setup) -> BpfObject:
    from sonde.collect.queues import QueueCollector

    return QueueCollector.bpf_object(it.config.host_hz)


def _syscalls(it: Setup) -> Collector:
    from sonde.collect.syscalls import SyscallCollector

    return SyscallCollector(it.kernel)


def _syscalls_object(_: Setup) -> BpfObject:
    from sonde.collect.syscalls import SyscallCollector

    return SyscallCollector.bpf_object()


def _tasks(it: Setup) -> Collector:
    from sonde.collect.tasks import TaskCollector

    return TaskCollector(it.kernel, least_ns=it.least_ns)


def _tasks_object(_: Setup) -> BpfObject:
    from sonde.collect.tasks import TaskCollector

    return TaskCollector.bpf_object()


def _traces(it: Setup) -> Collector:
    from sonde.collect.traces import TraceCollector

    return TraceCollector(it.kernel, it.config.hz)


def _traces_object(_: Setup) -> BpfObject:
    from sonde.collect.traces import TraceCollector

    return TraceCollector.bpf_object()


REGISTRY: tuple[Registration, ...] = (
    Registration(
        lambda c: c.on_cpu,
        lambda it: CpuSampler(it.kernel, it.config.hz),
        lambda it: CpuSampler.bpf_object(it.config.hz),
        fills_rings=True,
    ),
    Registration(lambda c: c.off_cpu, _waits, _waits_object, fills_rings=True),
    Registration(
        lambda c: c.traces and (c.on_cpu or c.off_cpu),
        _traces,
        _traces_object,
        fills_rings=True,
    ),
    Registration(lambda c: c.device_calls, _device_calls, lambda _: DeviceCalls.bpf_object()),
    Registration(
        lambda c: c.host_metrics,
        _tasks,
        _tasks_object,
    ),
    Registration(
        lambda c: c.host_metrics,
        _blocks,
        _blocks_object,
    ),
    Registration(
        lambda c: c.host_metrics,
        _flows,
        _flows_object,
    ),
    Registration(
        lambda c: c.host_metrics and c.host_hz > 0,
        _queues,
        _queues_object,
    ),
    Registration(
        lambda c: c.syscalls,
        _syscalls,
        _syscalls_object,
        fills_rings=True,
    ),
    Registration(
        lambda c: c.memory,
        _memory,
        _memory_object,
        fills_rings=True,
    ),
    Registration(
        lambda c: c.injected,
        _device_time,
        lambda _: LaunchSites.bpf_object(),
        needs_privilege=False,
    ),
    Registration(
        signals.are_wanted,
        lambda it: Metrics(signals.runners(it.config, polls_host=it.polls_host)),
        needs_privilege=False,
    ),
)
"""All collectors, in the order in which they are started and drained."""


def fills_rings(config: Config) -> bool:
    """Whether a configuration has collectors whose rings have to be drained often."""
    return any(it.fills_rings and it.is_wanted(config) for it in REGISTRY)


def kernel_of(config: Config, *, privileged: bool, chooses: bool = False) -> Kernel:
    """The kernel side of an agent. Where it is privileged, other threads begin to load the BPF
    programs that its collectors need.

    `chooses`: as in `Kernel`. Raises HostError where this machine cannot.
    """
    kernel = Kernel(config.pids if privileged else None, chooses=chooses, traces=config.traces)
    if privileged:
        _load_ahead(config, kernel)
    return kernel


def _load_ahead(config: Config, kernel: Kernel) -> None:
    setup = Setup(config, kernel, privileged=True)
    kernel.load_ahead(
        it.bpf_object(setup) for it in REGISTRY if it.bpf_object and it.is_wanted(config)
    )


def collectors_of(
    config: Config,
    kernel: Kernel,
    *,
    privileged: bool,
    files_budget: FileBudget | None = None,
    plain_files: PlainFiles | None = None,
    polls_host: bool = True,
) -> list[Collector]:
    """The collectors that a configuration asks for: loaded, not started.

    `files_budget`, `plain_files`, `polls_host`: as in `Setup`. Raises HostError where this machine
    cannot.
    """
    setup = Setup(config, kernel, privileged, files_budget, plain_files, polls_host)
    return [
        it.make(setup)
        for it in REGISTRY
        if it.is_wanted(config) and (privileged or not it.needs_privilege)
    ]
