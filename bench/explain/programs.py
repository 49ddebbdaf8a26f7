# SPDX-License-Identifier: Apache-2.0
"""Real PyTorch, Triton and JAX programs, each with one known cause of waiting.

A program is a step with the cause (`on`) and the same step without it (`off`), so that the truth of
what the cause costs is measured, not assumed: the difference of their step times. Parameters are
drawn from a seeded generator, in ranges where the program without its cause keeps its device (or
the host that it is about) busy, and where the cause is to cost a fifth of the step or more: a
program has one cause, and it is worth interner. Whether a draw does so is measured, too.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

Step = Callable[[], None]


@dataclass
class Work:
    """What a run does: `steps` times `on`, then `steps` times `off` (None: nothing to compare)."""

    on: Step
    off: Step | None
    steps: int
    parameters: dict[str, Any]
    before_off: Step = lambda: None
    before_on: Step = lambda: None
    close: Step = lambda: None
    disturb: bool = False
    """Whether the disturber of the harness is active while `on` runs."""


Build = Callable[[random.Random], Work]
"""Makes a program's work, with parameters drawn by a generator."""


@dataclass(frozen=True)
class Kind:
    """A program with a known cause. `expected` holds the right verdict on it."""

    build: Build
    disturber: str = ""
    """What the harness runs beside it: '' nothing; 'cpu', 'gpu', 'quota' or 'stop'."""


KINDS: dict[str, Kind] = {}
"""All programs by name."""


def kind(disturber: str = "") -> Callable[[Build], Build]:
    """Registers the decorated function as a program."""

    def register(build: Build) -> Build:
        KINDS[build.__name__] = Kind(build, disturber)
        return build

    return register


def matrices(size: int, count: int = 2) -> list[torch.Tensor]:
    return [torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(count)]


def model(rng: random.Random, layers: int = 2) -> tuple[Step, dict[str, Any]]:
    """Some matrix products: the useful part of most programs; 0.2 to 1.2 ms."""
    size = rng.choice([3072, 4096, 5120])
    a, b = matrices(size)

    def forward() -> None:
        x = a
        for _ in range(layers):
            x = torch.relu(x @ b)

    return forward, {"size": size, "layers": layers}


def graph_of(step: Step) -> Step:
    """The step as a CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Step = graph.replay
    return replay


@kind()
def small_kernels(rng: random.Random) -> Work:
    count = rng.randint(60, 200)
    tensors = [torch.randn(rng.choice([1024, 4096, 16384]), device="cuda") for _ in range(4)]

    def step() -> None:
        for i in range(count // 4):
            x = tensors[i % 4]
            x = x + 1.0
            x = x * 0.5
            x = torch.relu(x)
            x = torch.tanh(x)

    return Work(step, graph_of(step), 4000 // count, {"kernels": count})


@kind()
def item_every_step(rng: random.Random) -> Work:
    # A wait costs some 26 µs: three products of 3072 take ten times as long.
    size, products = rng.choice([(2560, 1), (2560, 2), (3072, 1), (3584, 1)])
    a, b = matrices(size)

    last: dict[str, torch.Tensor] = {}

    def off() -> None:
        x = a
        for _ in range(products):
            x = x @ b
        last["loss"] = x[0, 0]

    def on() -> None:
        off()
        last["loss"].item()

    return Work(on, off, 400, {"size": size, "products": products})


@kind()
def pageable_copy(rng: random.Random) -> Work:
    forward, parameters = model(rng)
    megabytes = rng.randint(20, 80)
    batch = torch.randn(megabytes * 250_000)
    batch_there = batch.cuda()

    def on() -> None:
        x = batch.to("cuda")
        x.add_(1)
        forward()

    def off() -> None:
        batch_there.add_(1)
        forward()

    return Work(on, off, 60, {"megabytes": megabytes, **parameters})


@kind()
def copy_bound(rng: random.Random) -> Work:
    forward, parameters = model(rng, 1)
    megabytes = rng.randint(80, 320)
    batch = torch.randn(megabytes * 250_000).pin_memory()
    there = torch.empty_like(batch, device="cuda")

    def on() -> None:
        there.copy_(batch, non_blocking=True)
        there[:1_000_000].add_(1)
        forward()

    def off() -> None:
        there[:1_000_000].add_(1)
        forward()

    return Work(on, off, 80, {"megabytes": megabytes, **parameters})


@kind()
def small_copies(rng: random.Random) -> Work:
    forward, parameters = model(rng)
    count, length = rng.randint(60, 200), rng.choice([1, 64, 1024])
    rows = [torch.randn(length) for _ in range(count)]
    there = [row.cuda() for row in rows]

    def on() -> None:
        for row in rows:
            row.to("cuda")
        forward()

    def off() -> None:
        del there[count:]
        forward()

    return Work(on, off, 40, {"copies": count, "floats": length, **parameters})


class Slow(torch.utils.data.Dataset):  # type: ignore[misc]  # known where there is PyTorch
    """Samples that take a while: they sleep (a slow disk) or compute (decoding)."""

    def __init__(self, cost_ms: float, how: str) -> None:
        self.cost_s, self.how = cost_ms / 1e3, how

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> np.ndarray:
        if self.how == "sleep":
            time.sleep(self.cost_s)
        else:
            until = time.perf_counter() + self.cost_s
            while time.perf_counter() < until:
                np.sort(np.random.default_rng(index).standard_normal(4000))
        return np.zeros(1024, np.float32)


def fed(rng: random.Random, workers: int, cost_ms: float) -> Work:
    forward, parameters = model(rng, rng.randint(2, 4))
    batch, how = rng.choice([2, 4]), rng.choice(["sleep", "decode"])
    loader = torch.utils.data.DataLoader(
        Slow(cost_ms / batch, how), batch_size=batch, num_workers=workers
    )
    batches = iter(loader)
    ready = next(batches).cuda()

    def on() -> None:
        x = next(batches).cuda()
        x.add_(1)
        forward()

    def off() -> None:
        ready.add_(1)
        forward()

    def close() -> None:
        nonlocal batches
        del batches

    return Work(
        on, off, 40, {"workers": workers, "cost_ms": cost_ms, "how": how, **parameters}, close=close
    )


@kind()
def slow_loader(rng: random.Random) -> Work:
    return fed(rng, 0, rng.uniform(3, 12))


@kind()
def one_worker(rng: random.Random) -> Work:
    return fed(rng, 1, rng.uniform(5, 15))


@kind()
def gil_bound(rng: random.Random) -> Work:
    size = rng.choice([1024, 2048])
    a, b = matrices(size)
    go, end = threading.Event(), threading.Event()
    threads = rng.randint(1, 2)

    def preprocess() -> None:
        while not end.is_set():
            if not go.wait(0.05):
                continue
            total = 0
            for i in range(20_000):
                total += i * i % 7

    for _ in range(threads):
        threading.Thread(target=preprocess, daemon=True).start()

    def step() -> None:
        x = a
        for _ in range(3):
            x = x @ b

    return Work(
        step, step, 25, {"size": size, "threads": threads},
        before_on=go.set, before_off=go.clear, close=end.set,
    )  # fmt: skip


@kind()
def lock_held(rng: random.Random) -> Work:
    forward, parameters = model(rng)
    lock, go, end = threading.Lock(), threading.Event(), threading.Event()
    hold_ms = rng.uniform(4, 12)

    def holder() -> None:
        while not end.is_set():
            if not go.wait(0.05):
                continue
            with lock:
                time.sleep(hold_ms / 1e3)
            time.sleep(0.0003)

    threading.Thread(target=holder, daemon=True).start()

    taken = [0]

    def step() -> None:
        with lock:
            taken[0] += 1
        forward()
        torch.cuda.current_stream().synchronize()

    return Work(
        step, step, 600, {"hold_ms": hold_ms, **parameters},
        before_on=go.set, before_off=go.clear, close=end.set,
    )  # fmt: skip


def chatty(rng: random.Random) -> tuple[Step, dict[str, Any]]:
    """A step that needs its CPU: launches that just keep the device busy."""
    size = rng.choice([2048, 2560])
    a, b = matrices(size)

    def step() -> None:
        x = a
        for _ in range(8):
            x = x @ b
        torch.cuda.current_stream().synchronize()

    return step, {"size": size}


@kind(disturber="cpu")
def cpu_rival(rng: random.Random) -> Work:
    step, parameters = chatty(rng)
    return Work(step, step, 1500, parameters, disturb=True)


@kind(disturber="quota")
def cpu_quota(rng: random.Random) -> Work:
    step, parameters = chatty(rng)
    return Work(step, step, 1500, parameters, disturb=True)


@kind(disturber="stop")
def stopped(rng: random.Random) -> Work:
    step, parameters = chatty(rng)
    return Work(step, step, 1500, parameters, disturb=True)


@kind(disturber="gpu")
def rival_tenant(rng: random.Random) -> Work:
    size = rng.choice([2048, 2560, 3072])  # with 1024 the host cannot launch as fast as that
    a, b = matrices(size)

    def step() -> None:
        x = a
        for _ in range(100):
            x = x @ b
        torch.cuda.current_stream().synchronize()

    return Work(step, step, 25, {"size": size}, disturb=True)


@kind()
def page_faults(rng: random.Random) -> Work:
    forward, parameters = model(rng, 2)
    megabytes = rng.randint(40, 120)

    def touched() -> np.ndarray:
        memory = mmap.mmap(-1, megabytes << 20)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        pages = np.frombuffer(memory, np.uint8)
        pages[::4096] = 1
        return pages

    def on() -> None:
        touched()
        forward()

    return Work(on, forward, 30, {"megabytes": megabytes, **parameters})


@kind()
def allocator_churn(rng: random.Random) -> Work:
    forward, parameters = model(rng, 2)
    megabytes = [rng.randint(64, 512) for _ in range(rng.randint(3, 6))]

    def off() -> None:
        held = [torch.empty(m << 20, dtype=torch.uint8, device="cuda") for m in megabytes]
        held[0].zero_()
        forward()

    def on() -> None:
        off()
        torch.cuda.empty_cache()

    return Work(on, off, 40, {"megabytes": megabytes, **parameters})


@kind()
def host_python(rng: random.Random) -> Work:
    forward, parameters = model(rng, 2)
    words = rng.randint(15_000, 50_000)
    text = " ".join(f"word{i % 977}" for i in range(words))

    def tokenize() -> int:
        total = 0
        for character in text:
            if character == " ":
                total += 1
        return total

    def on() -> None:
        tokenize()
        forward()

    return Work(on, forward, 40, {"words": words, **parameters})


@kind()
def checkpoint_fsync(rng: random.Random) -> Work:
    forward, parameters = model(rng, 2)
    kilobytes = rng.choice([1024, 4096])
    block = os.urandom(kilobytes * 1024)
    file = tempfile.NamedTemporaryFile(dir=Path.cwd(), delete=True)  # noqa: SIM115

    def on() -> None:
        file.seek(0)
        file.write(block)
        file.flush()
        os.fsync(file.fileno())
        forward()

    return Work(on, forward, 40, {"kilobytes": kilobytes, **parameters}, close=file.close)


@contextlib.contextmanager
def built(name: str, seed: int) -> Iterator[Work]:
    """One program, ready to run; closed at the end."""
    work = KINDS[name].build(random.Random(f"{name}-{seed}"))
    try:
        yield work
    finally:
        work.close()
