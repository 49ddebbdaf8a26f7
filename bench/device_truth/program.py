# SPDX-License-Identifier: Apache-2.0
"""A loop at work: `python -m bench.device_truth.program LOOP`.

Lines on standard input, answers in JSON: `begin` (builds the loop), `profile S` (what CUPTI
measures in S seconds), `count` (steps done, and when in ns), `stamps` (how many steps were done by
when; ends).
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from bench import stub
from bench.device_truth.graph_loops import GRAPHS
from bench.device_truth.loops import LOOPS, Step
from bench.device_truth.unseen_loops import UNSEEN

BLOCK_S = 0.015
"""Of steps between two waits for the device, which bound its queue."""
TOP = 8
"""Kernels that are kept of a window."""
STUB_LOOPS = ("eager", "graph", "decode")
Event = tuple[str, int, int]
"""Name, begin, end in ns."""
_COPIES = {"HtoD": "h2d", "DtoH": "d2h", "DtoD": "d2d", "PtoP": "p2p"}


class Device(Protocol):
    """What a loop runs on."""

    def make(self, loop: str) -> Step:
        """One step of a loop."""

    def synchronize(self) -> None:
        """Wait for all that was launched."""

    def trace(self, run: Step) -> tuple[list[Event], int]:
        """(what the device ran meanwhile, its time in ns): from an idle device to an idle one."""


class Cuda:
    """A GPU, by PyTorch."""

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def make(self, loop: str) -> Step:
        """One step of a loop."""
        self._torch.manual_seed(7)
        return (LOOPS | UNSEEN | GRAPHS)[loop]()

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        self._torch.cuda.synchronize()

    def trace(self, run: Step) -> tuple[list[Event], int]:
        """By torch.profiler, whose only activity is CUDA's."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as traced:
            self.synchronize()
            began_ns = time.monotonic_ns()
            run()
            self.synchronize()
            took_ns = time.monotonic_ns() - began_ns
        on_device = self._torch.autograd.DeviceType.CUDA
        results = traced.profiler.kineto_results if traced.profiler else None
        return [
            (one.name(), one.start_ns(), one.start_ns() + one.duration_ns())
            for one in (results.events() if results else ())
            if one.device_type() == on_device
        ], took_ns


class Stub:
    """A stub of the driver: what its steps take is known."""

    def __init__(self) -> None:
        self._device = stub.StubDevice()
        self._step: list[tuple[str, int]] = []
        self._steps = 0

    def make(self, loop: str) -> Step:
        """One step of a loop."""
        if loop in ("graph", "decode"):
            self._step += [("graph", 90_000)]
        if loop in ("eager", "decode"):
            self._step += [*stub.KERNELS.items()] * 5
        made = self._device.make_loop(loop)

        def step() -> None:
            self._steps += 1
            made()

        return step

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        self._device.synchronize()

    def trace(self, run: Step) -> tuple[list[Event], int]:
        """What the stub was given, one after another."""
        first, began_ns = self._steps, time.monotonic_ns()
        run()
        self.synchronize()
        took_ns = time.monotonic_ns() - began_ns
        events, at = [], 0
        for name, ns in self._step * (self._steps - first):
            events.append((name, at, at + ns))
            at += ns
        return events, took_ns


def measured(events: Iterable[Event], window_ns: int, steps: int) -> dict[str, Any]:
    """What a window shows: times in ns, and counts, of all of it."""
    kernels: Counter[str] = Counter()
    found: dict[str, Any] = {"window_ns": window_ns, "steps": steps}
    copies: Counter[str] = Counter()
    sets_ns, spans = 0, []
    for name, start, end in events:
        if name.startswith("Memcpy"):
            copies[next((d for word, d in _COPIES.items() if word in name), "unknown")] += (
                end - start
            )
        elif name.startswith("Memset"):
            sets_ns += end - start
        else:
            kernels[name] += end - start
            spans.append((start, end))
    busy_ns = union_ns(spans)
    found |= {
        "busy_ns": busy_ns,
        "kernels_ns": sum(kernels.values()),
        "count": len(spans),
        "kernels": dict(kernels.most_common(TOP)),
        "copies": dict(copies),
        "sets_ns": sets_ns,
        "busy": round(busy_ns / window_ns, 4),
    }
    return found


def union_ns(spans: list[tuple[int, int]]) -> int:
    """The time in which at least one of them is under way."""
    if not spans:
        return 0
    both = np.array(sorted(spans), np.int64)
    reach = np.maximum.accumulate(both[:, 1])
    before = np.concatenate([both[:1, 0], reach[:-1]])
    return int(np.maximum(0, both[:, 1] - np.maximum(both[:, 0], before)).sum())


class Loop:
    """The steps, and how many were done by when."""

    def __init__(self, device: Device, name: str) -> None:
        self.device = device
        self.step = device.make(name)
        self.steps = 0
        self.stamps: list[tuple[int, int]] = []
        for _ in range(5):
            self.step()
        device.synchronize()
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < 0.3 or done < 4:
            self.step()
            done += 1
            if not done & done - 1:  # a few times only
                device.synchronize()
        device.synchronize()
        self.block = max(1, round(BLOCK_S * done / (time.perf_counter() - began)))

    def run(self) -> None:
        """A block of steps."""
        for _ in range(self.block):
            self.step()
        self.device.synchronize()
        self.steps += self.block
        self.stamps.append((time.monotonic_ns(), self.steps))

    def profile(self, seconds: float) -> dict[str, Any]:
        """What CUPTI measures meanwhile."""

        def run() -> None:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                self.run()

        first = self.steps
        events, took_ns = self.device.trace(run)
        return measured(events, took_ns, self.steps - first)


def main() -> int:
    """Step between commands."""
    device: Device = Stub() if stub.FOLDER in os.environ else Cuda()
    if sys.stdin.readline().strip() != "begin":
        return 1
    loop = Loop(device, sys.argv[1])
    print(json.dumps({"block": loop.block}), flush=True)
    while True:
        loop.run()
        if not select.select([sys.stdin], [], [], 0)[0]:
            continue
        word, *rest = sys.stdin.readline().split() or ["stamps"]
        if word == "stamps":
            print(json.dumps(loop.stamps), flush=True)
            return 0
        if word == "count":
            at_ns, steps = loop.stamps[-1]
            print(json.dumps([steps, at_ns]), flush=True)
            continue
        print(json.dumps(loop.profile(float(rest[0]))), flush=True)


if __name__ == "__main__":
    sys.exit(main())
