# SPDX-License-Identifier: Apache-2.0
"""Programs that the device itself limits, and those of Triton, torch.compile and JAX."""

from __future__ import annotations

import random
from typing import Any

import torch

from bench.explain.programs import Work, graph_of, kind, matrices


@kind()
def memory_bound(rng: random.Random) -> Work:
    x = torch.randn(rng.randint(200, 600) * 1_000_000, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn_like(x)
    how = rng.choice(["pointwise", "norm", "sum"])

    def step() -> None:
        if how == "pointwise":
            torch.addcmul(x, x, weight, value=0.1)
            torch.relu(x)
        elif how == "norm":
            rows = x[: x.numel() // 4096 * 4096].view(-1, 4096)
            torch.nn.functional.layer_norm(rows, (4096,))
        else:
            x.float().sum()
            (x + weight).amax()

    return Work(step, None, 250, {"how": how, "elements": x.numel()})


@kind()
def compute_bound(rng: random.Random) -> Work:
    size = rng.choice([6144, 8192])
    a, b = matrices(size)

    def step() -> None:
        torch.nn.functional.gelu(a @ b) @ b

    return Work(step, None, 120, {"size": size})


@kind()
def transformer(rng: random.Random) -> Work:
    width, tokens = rng.choice([1024, 2048]), rng.choice([8192, 16384])
    layer = torch.nn.TransformerEncoderLayer(
        width, width // 64, 4 * width, batch_first=True, device="cuda", dtype=torch.bfloat16
    )
    x = torch.randn(tokens // 1024, 1024, width, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True, capturable=True)

    def step() -> None:
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()

    return Work(step, graph_of(step), 60, {"width": width, "tokens": tokens})


@kind()
def serialised_streams(rng: random.Random) -> Work:
    streams = [torch.cuda.Stream() for _ in range(rng.randint(3, 6))]
    cycles = rng.randint(300_000, 900_000)
    before: Any = None

    def work(ordered: bool) -> None:
        nonlocal before
        for stream in streams:
            with torch.cuda.stream(stream):
                if ordered and before is not None:
                    stream.wait_event(before)
                torch.cuda._sleep(cycles)  # one block: leaves the device to others
                before = stream.record_event()

    return Work(
        lambda: work(True), lambda: work(False), 300, {"streams": len(streams), "cycles": cycles}
    )


@kind()
def graph_replay(rng: random.Random) -> Work:
    x = torch.randn(rng.randint(40, 120) * 1_000_000, device="cuda")
    layers = rng.randint(8, 20)

    def step() -> None:
        y = x
        for _ in range(layers):
            y = torch.tanh(y * 1.01)

    return Work(graph_of(step), None, 2400 // layers, {"layers": layers, "elements": x.numel()})


@kind()
def triton_small(rng: random.Random) -> Work:
    from bench.explain.triton_kernels import add_one

    count = rng.randint(60, 150)
    x = torch.zeros(rng.choice([1024, 8192]), device="cuda")

    def step() -> None:
        for _ in range(count):
            add_one[(x.numel() // 1024,)](x, x.numel(), BLOCK=1024)

    step()
    return Work(step, graph_of(step), 4000 // count, {"kernels": count})


@kind()
def compiled_pointwise(rng: random.Random) -> Work:
    x = torch.randn(rng.randint(100, 300) * 1_000_000, device="cuda")
    shift = rng.random()

    @torch.compile
    def chain(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(torch.tanh(x * 1.01 + 0.5) - 0.25)

    def step() -> None:
        chain(x)

    return Work(step, None, 400, {"elements": x.numel(), "shift": shift})


@kind()
def compiled_item(rng: random.Random) -> Work:
    # Launching again takes the host 0.1 to 0.25 ms under a profiler, the kernel 1.5 µs a million.
    x = torch.randn(rng.randint(250, 350) * 1_000_000, device="cuda")

    @torch.compile
    def chain(x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x * 1.01 + 0.5) - 0.25).sum()

    last: dict[str, torch.Tensor] = {}

    def off() -> None:
        last["loss"] = chain(x)

    def on() -> None:
        off()
        last["loss"].item()

    return Work(on, off, 300, {"elements": x.numel()})


@kind()
def jax_products(rng: random.Random) -> Work:
    import jax
    import jax.numpy as jnp

    size = rng.choice([6144, 8192])
    a = jnp.ones((size, size), jnp.bfloat16)
    product = jax.jit(lambda x: x @ (x + 1))
    held: list[Any] = [a]

    def step() -> None:
        held[0] = product(a)

    return Work(step, None, 120, {"size": size})


@kind()
def jax_float(rng: random.Random) -> Work:
    import jax
    import jax.numpy as jnp

    size = rng.choice([5120, 6144])  # smaller ones are done before the next one is asked for
    a = jnp.ones((size, size), jnp.bfloat16)
    product = jax.jit(lambda x: (x @ (x + 1)).sum())
    last: list[Any] = [product(a)]

    def off() -> None:
        last[0] = product(a)

    def on() -> None:
        float(product(a))

    return Work(on, off, 300, {"size": size})
