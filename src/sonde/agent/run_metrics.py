# SPDX-License-Identifier: Apache-2.0
"""Runs on devices as metrics: time by kernel, launches, sizes of copies, grids and blocks.

Rows of the table device_run are a sample; each counts by its weight, so the sums
are unbiased. Kernels have names without number: one gets a separate series once it had a
hundredth of the device's time, at most `KERNELS_NAMED` do, the rest is `other`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from sonde.model.rows import DeviceRunRow
from sonde.sinks.series import OTHER, MetricRegistry

KERNELS_NAMED = 40
KERNELS_WEIGHED = 2_000
"""Names of which the time is remembered, to see who deserves a series."""
SHARE = 0.01
COPY_STEPS = tuple(4**power for power in range(5, 16))
"""1 kB, 4 kB … 1 GB."""
GRID_STEPS = tuple(4**power for power in range(11))
BLOCK_STEPS = (32, 64, 128, 256, 512, 1024)
_DIRECTIONS = {"h2d": "receive", "d2h": "transmit"}


class RunMetrics:
    """Counts runs into a registry."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._registry = registry
        self._named: set[str] = set()
        self._weighed: dict[str, float] = {}
        self._all_s = 0.0

    def take(self, run: DeviceRunRow) -> None:
        """Count a run."""
        kind, weight = run.kind, run.weight
        if kind == "sync":
            return  # time of the host
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
            way = run.direction
            attributes: Mapping[str, str] = {
                "sonde.up_to": _step(run.bytes, COPY_STEPS),
                "network.io.direction": _DIRECTIONS.get(way, way),
            }
            count("sonde.gpu.copies", attributes, weight)

    def _name(self, name: str, seconds: float) -> str:
        self._all_s += seconds
        if name in self._named:
            return name
        if name in self._weighed or len(self._weighed) < KERNELS_WEIGHED:
            self._weighed[name] = self._weighed.get(name, 0.0) + seconds
        heavy = self._weighed.get(name, 0.0) >= SHARE * self._all_s
        if heavy and len(self._named) < KERNELS_NAMED:
            self._named.add(name)
            del self._weighed[name]
            return name
        return OTHER


def _step(size: int, steps: tuple[int, ...]) -> str:
    """The first step that is not below; 'more' above the last."""
    return next((str(step) for step in steps if size <= step), "more")


def _volume(extent: str) -> int:
    """Of 'x,y,z'; 0 where it is not known."""
    parts = extent.split(",")
    return prod(map(int, parts)) if all(part.isdigit() for part in parts) else 0
