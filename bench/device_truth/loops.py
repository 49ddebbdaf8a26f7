# SPDX-License-Identifier: Apache-2.0
"""Loops of steady steps on a GPU: one for each way in which timing by events may be wrong."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEGA = 1 << 20
Step = Callable[[], None]


def layers(width: int, count: int, rows: int) -> Step:
    """A multi-layer perceptron, forward only: matrix products between short kernels."""
    import torch

    layers = [torch.nn.Linear(width, width).cuda().half() for _ in range(count)]
    x = torch.rand(rows, width, device="cuda").half()

    def step() -> None:
        with torch.no_grad():
            y = x
            for layer in layers:
                y = torch.relu(layer(y))

    return step


def eager_mlp() -> Step:
    """About forty launches a step, the device mostly behind."""
    return layers(2048, 20, 1024)


def small_kernels() -> Step:
    """Kernels of 1 to 5 us, limited by launches."""
    import torch

    sizes = (256, MEGA // 4, MEGA, 4 * MEGA)
    vectors = [torch.rand(size, device="cuda") for size in sizes]

    def step() -> None:
        for one in vectors:
            one.mul_(0.999)
            one.add_(0.001)

    return step


def captured(run: Step) -> Step:
    """Replays of a step, whose memory stays as long as the replays do."""
    import torch

    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    held: tuple[Any, Step] = (graph, run)
    return lambda: held[0].replay()


def graph_replay() -> Step:
    """Replays one after another."""
    return captured(layers(1024, 20, 256))


def decode() -> Step:
    """A replay of short kernels, some launches and a result that is read: then the device idles."""
    import torch

    replay = captured(layers(1024, 12, 8))
    y = torch.rand(1024, device="cuda")

    def step() -> None:
        replay()
        for _ in range(5):
            y.add_(0.001)
        y[0].item()

    return step


def training() -> Step:
    """Forward, backward and optimizer of a transformer: kernels of 1 to 200 us."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.rand(16, 256, 1024, device="cuda").bfloat16()

    def step() -> None:
        optimizer.zero_grad()
        model(batch).float().square().mean().backward()
        optimizer.step()

    return step


def _products(size: int, count: int) -> Step:
    """Matrix products one after another, for a copy to stand between."""
    import torch

    a, b = (torch.rand(size, size, device="cuda").half() for _ in range(2))
    c = torch.empty_like(a)

    def step() -> None:
        for _ in range(count):
            torch.mm(a, b, out=c)

    return step


def _to_the_host(size: int) -> Step:
    """A copy to pageable memory, new each time, as `.cpu()` makes it."""
    import torch

    work, source = _products(2048, 8), torch.rand(size // 4, device="cuda")

    def step() -> None:
        work()
        source.cpu()

    return step


def d2h_pageable_4() -> Step:
    """4 MiB to pageable memory."""
    return _to_the_host(4 * MEGA)


def d2h_pageable_16() -> Step:
    """16 MiB to pageable memory."""
    return _to_the_host(16 * MEGA)


def _to_the_device(pinned: bool) -> Step:
    import torch

    source = torch.rand(4 * MEGA)
    source = source.pin_memory() if pinned else source
    work, target = _products(2048, 8), torch.empty(4 * MEGA, device="cuda")

    def step() -> None:
        target.copy_(source, non_blocking=True)
        work()

    return step


def h2d_pinned() -> Step:
    """16 MiB from pinned memory."""
    return _to_the_device(True)


def h2d_pageable() -> Step:
    """16 MiB from pageable memory."""
    return _to_the_device(False)


def two_streams() -> Step:
    """Products of two streams, small enough to run at the same time."""
    import torch

    streams = [torch.cuda.Stream() for _ in range(2)]
    works = [_products(512, 10), _products(768, 10)]
    torch.cuda.synchronize()

    def step() -> None:
        for stream, work in zip(streams, works, strict=True):
            with torch.cuda.stream(stream):
                work()

    return step


def d2d() -> Step:
    """Copies of 64 MiB within the device."""
    import torch

    work, source = _products(2048, 4), torch.rand(16 * MEGA, device="cuda")
    target = torch.empty_like(source)

    def step() -> None:
        work()
        target.copy_(source)

    return step


def runtime() -> ctypes.CDLL:
    """PyTorch's runtime library, which is mapped already."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcudart" in line:
            return ctypes.CDLL(line.split(maxsplit=5)[5])
    raise RuntimeError("this PyTorch has its CUDA runtime inside; the loop needs libcudart.so")


def memsets() -> Step:
    """Sets of 64 MiB, by the runtime: PyTorch fills by kernels."""
    import torch

    cudart, work = runtime(), _products(2048, 4)
    target = torch.empty(64 * MEGA, dtype=torch.uint8, device="cuda")
    words = [ctypes.c_void_p(target.data_ptr()), 0, ctypes.c_size_t(target.numel())]

    def step() -> None:
        work()
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if cudart.cudaMemsetAsync(*words, stream):
            raise RuntimeError("cudaMemsetAsync failed")

    return step


def matmul() -> Step:
    """Products of milliseconds: the device is never idle."""
    return _products(8192, 1)


LOOPS: dict[str, Callable[[], Step]] = {
    one.__name__: one
    for one in (
        *(eager_mlp, small_kernels, graph_replay, decode, training, d2h_pageable_4),
        *(d2h_pageable_16, h2d_pinned, h2d_pageable, two_streams, d2d, memsets, matmul),
    )
}
