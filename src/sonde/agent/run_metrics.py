# SPDX-License-Identifier: Apache-2.0
"""Runs on devices as metrics: time by kernel, launches, sizes of copies, grids and blocks.

Rows of the table device_run are a sample; each counts by its weight, so the sums are unbiased. The
number of kernel names is unbounded: a kernel gets a separate series once it had a hundredth of the
time of all kernels so far, and keeps it; the first `MAX_NAMED` kernels do, and the others are
summed as `other`. So kernels of a program's start may take the series. Replayed graphs count as
runs, not as kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from sonde.model.rows import DeviceRunRow
from sonde.sinks.series import OTHER, MetricRegistry

MAX_NAMED = 40
MAX_WEIGHED = 2_000
"""Other kernels whose time is remembered, to see which gets a series; once there are as many, one
that was not seen before gets none."""
SHARE = 0.01
"""Of the time of kernels: from there on a kernel gets a series."""
COPY_STEPS = tuple(4**power for power in range(5, 16))
"""Upper bounds of the buckets of a histogram (attribute `sonde.up_to`): 1 KiB, 4 KiB … 1 GiB."""
GRID_STEPS = tuple(4**power for power in range(11))
"""The same of numbers of blocks in a grid."""
BLOCK_STEPS = (32, 64, 128, 256, 512, 1024)
"""The same of numbers of threads in a block."""
_DIRECTIONS = {"h2d": "receive", "d2h": "transmit"}
"""As the device sees them, by OpenTelemetry's attribute; others keep Sonde's names (d2d, p2p,
…)."""


class RunMetrics:
    """Counts runs into a registry."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._registry = registry
        self._named: set[str] = set()
        self._weighed: dict[str, float] = {}
        """Seconds of kernels that have no series yet."""
        self._all_s = 0.0
        """Seconds of all kernels."""

    def take(self, run: DeviceRunRow) -> None:
        """Count a run."""
        kind, weight = run.kind, run.weight
        if kind == "sync":
            return  # a wait of the host, no run
        seconds = weight * (run.end_time_ns - run.start_time_ns) / 1e9
        count = self._registry.count
        count("sonde.gpu.runs", {"sonde.gpu.run.kind": kind}, weight)
        count("sonde.gpu.run.time", {"sonde.gpu.run.kind": kind}, seconds)
        if kind == "kernel":
            kernel = {"sonde.gpu.kernel": self._name(run.name, seconds)}
            count("sonde.gpu.kernel.time", kernel, seconds)
            for what, extent, steps in (
                ("grid", run.grid, GRID_STEPS),
                ("block", run.block, BLOCK_STEPS),
            ):
                if size := _volume(extent):
                    limit = {"sonde.up_to": _step(size, steps)}
                    count(f"sonde.gpu.kernel.{what}s", limit, weight)
        elif kind == "copy" and run.bytes:
            direction = run.direction
            attributes: Mapping[str, str] = {
                "sonde.up_to": _step(run.bytes, COPY_STEPS),
                "network.io.direction": _DIRECTIONS.get(direction, direction),
            }
            count("sonde.gpu.copies", attributes, weight)

    def _name(self, name: str, seconds: float) -> str:
        """The kernel's name, or `other` where it has no series."""
        self._all_s += seconds
        if name in self._named:
            return name
        if name in self._weighed or len(self._weighed) < MAX_WEIGHED:
            self._weighed[name] = self._weighed.get(name, 0.0) + seconds
        heavy = self._weighed.get(name, 0.0) >= SHARE * self._all_s
        if heavy and len(self._named) < MAX_NAMED:
            self._named.add(name)
            del self._weighed[name]
            return name
        return OTHER


def _step(size: int, steps: tuple[int, ...]) -> str:
    """The bucket of a size: the least step that is not below it; 'more' above the last."""
    return next((str(step) for step in steps if size <= step), "more")


def _volume(extent: str) -> int:
    """x * y * z of 'x,y,z'; 0 where it is not known."""
    parts = extent.split(",")
    return prod(map(int, parts)) if all(part.isdigit() for part in parts) else 0
