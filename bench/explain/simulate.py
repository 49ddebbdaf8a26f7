# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.explain.simulate [COUNT [SEED]]`: steps found in timelines of known steps.

Programs drawn at random: layers of kernels whose names repeat, forward and backward, an optimizer;
with or without a batch's copy, a loss that is read, evaluation phases, shapes that change, pauses
(a collection, a checkpoint), records that were lost, and with or without the program's functions.
The truth is the median distance from one training step's first request on the device to the next's,
but for those with an evaluation between.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sonde.analyze.stalls import stalls_of
from sonde.analyze.steps import steps_of
from sonde.model.interner import Interner
from sonde.model.timeline import (
    CallKind,
    CopyDirection,
    DeviceKind,
    HostKind,
    Timeline,
    events,
)

WITHIN = 0.01
UNSEEN = 10_000
"""Seeds below 400 were looked at while the rules were made."""


@dataclass
class Program:
    """What a run is made of."""

    rng: random.Random
    features: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        rng = self.rng
        for feature, chance in (
            ("copy", 0.6), ("item", 0.4), ("evaluation", 0.4), ("shapes", 0.2), ("pauses", 0.3),
            ("lost", 0.2), ("functions", 0.5), ("long kernels", 0.5), ("host late", 0.3),
        ):  # fmt: skip
            if rng.random() < chance:
                self.features.add(feature)
        pool = [f"kernel_{i}" for i in range(rng.randint(3, 12))]
        self.layer = [rng.choice(pool) for _ in range(rng.randint(1, 6))]
        self.back = [f"{rng.choice(pool)}_backward" for _ in range(rng.randint(1, 8))]
        self.layers = rng.choice([1, 2, 4, 12, 24])
        self.optimizer = rng.choice([0, 1, 1, 4, 20])
        self.steps = rng.randint(12, 60)
        self.every = rng.randint(5, 20)
        self.length = rng.uniform(20, 300) if "long kernels" in self.features else rng.uniform(2, 8)


class _Run:
    """Lays requests and what the device does for them."""

    def __init__(self, program: Program) -> None:
        self.program, self.rng = program, program.rng
        self.interner = Interner()
        self.rows: dict[str, list[dict[str, Any]]] = {"device": [], "calls": [], "host": []}
        self.thread = self.interner.thread(100, 100, "python", "python")
        self.stream = self.interner.stream(0, 7)
        self.host, self.device, self.ids = 1e6, 1e6, 0
        self.lost = 0.002 if "lost" in program.features else 0.0

    def add(self, table: str, begin: float, end: float, name: str, **columns: Any) -> None:
        row = {"start_ns": round(begin * 1e3), "end_ns": round(end * 1e3), **columns}
        self.rows[table].append(row | {"name": self.interner.name(name)})

    def ask(self, name: str, length: float, call: CallKind, kind: DeviceKind, **more: Any) -> float:
        """A launch or a copy; returns when the device began with it."""
        self.ids += 1
        self.host += self.rng.uniform(1, 3)
        begin = max(self.device + 1, self.host + 5)
        self.device = begin + length * self.rng.uniform(0.7, 1.3)
        if self.rng.random() >= self.lost:
            at = {"track": self.thread, "kind": call, "correlation": self.ids}
            self.add("calls", self.host, self.host + 3, f"cuda{call.name}", **at)
            at = {"track": self.stream, "kind": kind, "correlation": self.ids}
            self.add("device", begin, self.device, name, **at, **more)
        self.host = max(self.host + 3, self.device - 20_000)  # its queue is not endless
        return begin

    def kernel(self, name: str) -> float:
        return self.ask(name, self.program.length, CallKind.LAUNCH, DeviceKind.KERNEL)

    def read(self) -> None:
        self.ask(
            "Memcpy DtoH", 2, CallKind.COPY, DeviceKind.COPY, direction=CopyDirection.D2H, bytes=4
        )
        end = max(self.host + 2, self.device + 2)
        self.add(
            "calls", self.host, end, "cudaStreamSynchronize", track=self.thread, kind=CallKind.SYNC
        )
        self.host = end

    def step(self, training: bool) -> float:
        """Returns when the device began with it."""
        program, rng = self.program, self.rng
        began, first = self.host, None
        if "host late" in program.features:
            self.host += rng.uniform(0.5, 1.0) * 2000
        suffix = rng.choice(["", "_tail"]) if "shapes" in program.features else ""
        if "copy" in program.features:
            first = self.ask(
                "Memcpy HtoD",
                20,
                CallKind.COPY,
                DeviceKind.COPY,
                direction=CopyDirection.H2D,
                bytes=1 << 20,
            )
        for _ in range(program.layers):
            inner = self.host
            for name in program.layer:
                at = self.kernel(name + suffix)
                first = at if first is None else first
            self.function(inner, "layer")
        if training:
            for _ in range(program.layers):
                for name in program.back:
                    self.kernel(name + suffix)
            for _ in range(program.optimizer):
                self.kernel("adam")
        if "item" in program.features:
            self.read()
        self.function(began, "train_step" if training else "evaluate_batch")
        assert first is not None
        return first

    def function(self, began: float, name: str) -> None:
        if "functions" in self.program.features:
            at = {"track": self.thread, "kind": HostKind.PYTHON}
            self.add("host", began + 0.1, self.host, f"train.py({len(name)}): {name}", **at)

    def timeline(self) -> Timeline:
        tables: dict[str, Any] = {}
        for name, rows in self.rows.items():
            columns = {key for row in rows for key in row}
            made = {column: [row.get(column, 0) for row in rows] for column in columns}
            if rows:
                tables[name] = events(**made)
        return Timeline(names=self.interner.names, tracks=self.interner.tracks, **tables)


def simulated(seed: int) -> tuple[Timeline, float, set[str]]:
    """A timeline, its true step in ns, and what its program has."""
    program = Program(random.Random(seed))
    run = _Run(program)
    began, parts = [], []
    whole = run.host
    for number in range(program.steps):
        began.append(run.step(training=True))
        if "pauses" in program.features and run.rng.random() < 0.08:
            run.host = max(run.host, run.device) + run.rng.uniform(5_000, 30_000)
        if "evaluation" in program.features and number % program.every == program.every - 1:
            parts.append(number)
            for _ in range(run.rng.randint(3, 10)):
                run.step(training=False)
    run.function(whole, "main")
    length = np.diff(began)
    keep = np.ones(len(length), bool)
    keep[[number for number in parts if number < len(length)]] = False
    return run.timeline(), float(np.median(length[keep])) * 1e3, program.features


def main() -> int:
    """Prints the share that is right, by what programs have."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    right: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    first = int(sys.argv[2]) if len(sys.argv) > 2 else UNSEEN
    for seed in range(first, first + count):
        timeline, truth, features = simulated(seed)
        found = steps_of(timeline, stalls_of(timeline, 0))
        length = found.median_ns if found else 0
        good = abs(length - truth) <= WITHIN * truth
        for name in ("all", *features, *(f"no {one}" for one in ("functions", "copy", "item"))):
            if name.removeprefix("no ") in features and name.startswith("no "):
                continue
            seen[name] += 1
            right[name] += good
        if not good and "-v" in sys.argv:
            result = found and (length / truth, found.operations, found.regularity)
            print(seed, sorted(features), result)
    for name, total in sorted(seen.items()):
        share = 100 * right[name] / total
        print(f"{name:14s} {right[name]:4} of {total:4} within 1 %: {share:.1f} %")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
