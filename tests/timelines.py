# SPDX-License-Identifier: Apache-2.0
"""Timelines made by hand, for tests of what is analysed: one thread, one device, times in µs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sonde.analyze.blame import blame_device
from sonde.analyze.causes import CAUSES
from sonde.analyze.merge import with_interpreter_lock
from sonde.model.causes import Cause
from sonde.model.interner import Interner
from sonde.model.timeline import (
    CallKind,
    CopyDirection,
    DeviceKind,
    DeviceUse,
    HostKind,
    Memory,
    StateKind,
    Timeline,
    events,
    no_events,
)

PID = 100
LAUNCH_US = 5
STEPS = 20


@dataclass
class Scene:
    """Collects events; `timeline()` makes a timeline of them."""

    interner: Interner = field(default_factory=Interner)
    rows: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {"device": [], "calls": [], "host": [], "states": []}
    )
    correlation: int = 0

    def _add(self, table: str, begin: float, end: float, **columns: Any) -> None:
        columns["name"] = self.interner.name(columns["name"])
        row = {"start_ns": round(begin * 1000), "end_ns": round(end * 1000), **columns}
        self.rows[table].append(row)

    def thread(self, tid: int = PID) -> int:
        return self.interner.thread(PID, tid, "python", "python")

    def kernel(
        self, begin: float, end: float, launched: float | None = None, *,
        name: str = "kernel", stream: int = 7, blocks: int = 0, device: int = 0,
        kind: DeviceKind = DeviceKind.KERNEL, tid: int = PID,
    ) -> None:  # fmt: skip
        """A kernel, launched at a time (at once before it begins, if left out)."""
        self.correlation += 1
        launched = begin - LAUNCH_US if launched is None else launched
        self._add(
            "calls", launched, launched + 4, name="cudaLaunchKernel", kind=CallKind.LAUNCH,
            track=self.thread(tid), correlation=self.correlation,
        )  # fmt: skip
        self._add(
            "device", begin, end, name=name, kind=kind, track=self.interner.stream(device, stream),
            correlation=self.correlation, blocks=blocks,
        )  # fmt: skip

    def copy(
        self, begin: float, end: float, size: int, *, called: float | None = None,
        direction: CopyDirection = CopyDirection.H2D, memory: Memory = Memory.PAGEABLE,
        stream: int = 7,
    ) -> None:  # fmt: skip
        """A copy and the call that asked for it."""
        self.correlation += 1
        called = begin - LAUNCH_US if called is None else called
        self._add(
            "calls", called, called + 4, name="cudaMemcpyAsync", kind=CallKind.COPY,
            track=self.thread(), correlation=self.correlation,
        )  # fmt: skip
        self._add(
            "device", begin, end, name=f"Memcpy {direction.name}", kind=DeviceKind.COPY,
            track=self.interner.stream(0, stream), correlation=self.correlation, bytes=size,
            direction=direction, memory=memory,
        )  # fmt: skip

    def call(self, begin: float, end: float, name: str, kind: CallKind, tid: int = PID) -> None:
        self._add("calls", begin, end, name=name, kind=kind, track=self.thread(tid))

    def sync(self, begin: float, end: float) -> None:
        self.call(begin, end, "cudaStreamSynchronize", CallKind.SYNC)

    def python(self, begin: float, end: float, name: str, tid: int = PID) -> None:
        self._add("host", begin, end, name=name, kind=HostKind.PYTHON, track=self.thread(tid))

    def range(self, begin: float, end: float, name: str) -> None:
        self._add("host", begin, end, name=name, kind=HostKind.RANGE, track=self.thread())

    def blocked(
        self, begin: float, end: float, reason: str, tid: int = PID, waker: int = 0
    ) -> None:
        """Off its CPU; `waker`: the thread that ended it."""
        self._add(
            "states", begin, end, name=reason, kind=StateKind.BLOCKED, track=self.thread(tid),
            waker=self.thread(waker) + 1 if waker else 0,
        )  # fmt: skip

    def runqueue(self, begin: float, end: float) -> None:
        kind = StateKind.RUNQUEUE
        self._add("states", begin, end, name="preempted", kind=kind, track=self.thread())

    def timeline(self, **more: Any) -> Timeline:
        tables: dict[str, Any] = {}
        for name, rows in self.rows.items():
            if not rows:
                tables[name] = no_events()
                continue
            columns = {key for row in rows for key in row}
            made = {column: [row.get(column, 0) for row in rows] for column in columns}
            tables[name] = events(**made)
        whole = Timeline(
            names=self.interner.names,
            tracks=self.interner.tracks,
            multiprocessors={0: 132},
            **tables,
        )
        return replace(whole, **more)


def repeated(scene: Scene, step: Callable[[Scene, float], object], length: float = 10_000) -> Scene:
    """`step(scene, t)` once every `length` µs, STEPS times."""
    for number in range(STEPS):
        step(scene, 1_000_000 + number * length)
    return scene


def used_by_another(share: float = 0.5) -> DeviceUse:
    """The driver's reports that another process used the first device."""
    return DeviceUse(PID + 1, 0, np.arange(1, 40, dtype=np.int64) * 100_000_000, np.full(39, share))


def shares(scene: Scene, **more: Any) -> dict[Cause, float]:
    """The share of each cause in the traced time of the first device."""
    more.setdefault("gpus_of", {PID: [0]})
    found = blame_device(with_interpreter_lock(scene.timeline(**more)), 0)
    window = found.stalls.window_ns
    return {one: found.total_ns(one) / window for one in CAUSES if found.total_ns(one)}
