# SPDX-License-Identifier: Apache-2.0
"""Which sources of metrics a configuration has, and where each runs (`collect.polling`).

A new source is one line in `sources_beside` (it reads files of the kernel and returns at once) or
in `sources_apart` (it calls a library that may hang).
"""

from __future__ import annotations

from collections.abc import Sequence

from sonde.collect.devices import present
from sonde.collect.metrics import Runner, ThreadRunner
from sonde.collect.polling import Source
from sonde.collect.subprocess_runner import SubprocessRunner
from sonde.config import Config


def are_wanted(config: Config) -> bool:
    """Whether the configuration has any source."""
    return config.host_metrics or config.group_pressure or config.device_metrics


def runners(config: Config, *, polls_host: bool = True) -> list[Runner]:
    """What polls the sources of the configuration; empty where it has none. `polls_host`: False
    where nobody reads metrics but those of devices."""
    found: list[Runner] = []
    beside = sources_beside(config) if polls_host else ()
    if beside:
        found.append(ThreadRunner("host", beside))
    found += sources_apart(config)
    return found


def sources_beside(config: Config) -> Sequence[Source]:
    """Sources that a thread of the agent polls."""
    found: list[Source] = []
    if config.host_metrics:
        from sonde.collect import host  # a dozen modules, which few recordings need

        found += host.sources()
    if config.group_pressure:
        from sonde.collect.host.group_pressure import GroupPressure

        found.append(GroupPressure(config.pids, are_limited_read=config.host_metrics))
    return found


def sources_apart(config: Config) -> Sequence[SubprocessRunner]:
    """Sources that are polled in a process each, once such a device is present."""
    if not config.device_metrics:
        return ()
    return (
        SubprocessRunner("nvml", "sonde.collect.devices.nvml:NvmlSource", present.nvidia),
        SubprocessRunner("amdsmi", "sonde.collect.devices.amdsmi:AmdSmiSource", present.amd),
        SubprocessRunner("drm", "sonde.collect.devices.drm:DrmSource", present.drm),
    )
