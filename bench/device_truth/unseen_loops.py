# SPDX-License-Identifier: Apache-2.0
"""Loops for a judgement of what the first ones were used to fit: other shapes, other mixes.

None of them was run before the table of timing errors was fixed (`sonde.analyze.timing_error`).
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable

from bench.device_truth.loops import MEGA, Step, captured, layers, runtime


def convolutions() -> Step:
    """Convolutions in half precision with normalisation between: cuDNN's kernels."""
    import torch
    from torch import nn

    widths = (64, 128, 128, 256)
    parts = []
    for before, after in itertools.pairwise(widths):
        parts += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)]
        parts += [nn.ReLU()]
    model = nn.Sequential(*parts).cuda().half().eval().to(memory_format=torch.channels_last)
    x = torch.rand(32, 64, 56, 56, device="cuda").half()
    x = x.to(memory_format=torch.channels_last)

    def step() -> None:
        with torch.no_grad():
            model(x)

    return step


def attention() -> Step:
    """Attention over 768 places, and its projection."""
    import torch

    q, k, v = (torch.rand(6, 12, 768, 64, device="cuda").bfloat16() for _ in range(3))
    project = torch.nn.Linear(768, 768).cuda().bfloat16()

    def step() -> None:
        with torch.no_grad():
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            project(y.transpose(1, 2).reshape(6, 768, 768)).softmax(-1)

    return step


def embeddings() -> Step:
    """Rows of a table of 256 MiB, summed up and normalised: memory alone."""
    import torch

    table = torch.rand(MEGA // 2, 128, device="cuda")
    chosen = torch.randint(MEGA // 2, (2048, 24), device="cuda")

    def step() -> None:
        with torch.no_grad():
            y = torch.nn.functional.embedding(chosen, table).sum(1)
            torch.nn.functional.layer_norm(y, (128,))

    return step


def recurrent() -> Step:
    """An LSTM of two layers over 40 moments: cuDNN's short kernels, in several streams."""
    import torch

    model = torch.nn.LSTM(640, 640, 2).cuda().half()
    model.flatten_parameters()
    x = torch.rand(40, 48, 640, device="cuda").half()

    def step() -> None:
        with torch.no_grad():
            model(x)

    return step


def reductions() -> Step:
    """Softmax, sums and a norm of 6 million numbers: kernels of 10 to 50 us."""
    import torch

    x = torch.rand(1536, 4096, device="cuda")

    def step() -> None:
        y = torch.softmax(x, 1)
        torch.nn.functional.layer_norm(x, (4096,))
        y.sum(0)
        y.amax()

    return step


def precise() -> Step:
    """Products in single and double precision."""
    import torch

    a, b = (torch.rand(1536, 1536, device="cuda") for _ in range(2))
    c, d = (torch.rand(512, 512, device="cuda", dtype=torch.float64) for _ in range(2))

    def step() -> None:
        torch.mm(a, b)
        torch.mm(c, d)
        a.neg()

    return step


def graph_long() -> Step:
    """Replays of a few long kernels."""
    import torch

    a, b = (torch.rand(3072, 3072, device="cuda").half() for _ in range(2))

    def work() -> None:
        for _ in range(3):
            torch.softmax(torch.mm(a, b), 1)

    return captured(work)


def graph_short() -> Step:
    """Replays of sixty kernels of 2 us."""
    import torch

    x = torch.rand(MEGA // 4, device="cuda")

    def work() -> None:
        for _ in range(30):
            x.mul_(0.999)
            x.add_(0.001)

    return captured(work)


def graph_uploads() -> Step:
    """A replay, and 2 MiB from pinned memory before it."""
    import torch

    source, target = torch.rand(MEGA // 2).pin_memory(), torch.empty(MEGA // 2, device="cuda")
    replay = captured(layers(1536, 8, 512))

    def step() -> None:
        target.copy_(source, non_blocking=True)
        replay()

    return step


def cnn_training() -> Step:
    """A small convolutional network in training, by SGD with momentum."""
    import torch
    from torch import nn

    model = nn.Sequential(
        *(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128 * 12 * 12, 100)),
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    images = torch.rand(128, 3, 48, 48, device="cuda")
    labels = torch.randint(100, (128,), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def experts() -> Step:
    """Rows handed to eight experts, their products, and the rows put back."""
    import torch

    x = torch.rand(2048, 768, device="cuda").half()
    order = torch.randperm(2048, device="cuda")
    weights = torch.rand(8, 768, 768, device="cuda").half()
    found = torch.zeros_like(x)

    def step() -> None:
        parts = x.index_select(0, order).view(8, 256, 768)
        found.index_copy_(0, order, torch.bmm(parts, weights).view(2048, 768))

    return step


def uploads() -> Step:
    """Three copies of 1 MiB from pinned memory, and some kernels for each."""
    import torch

    sources = [torch.rand(MEGA // 4).pin_memory() for _ in range(3)]
    targets = [torch.empty(MEGA // 4, device="cuda") for _ in range(3)]
    work = layers(1024, 3, 768)

    def step() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
            work()

    return step


def downloads() -> Step:
    """8 MiB to pinned memory behind products."""
    import torch

    work, source = layers(3072, 2, 1024), torch.rand(2 * MEGA, device="cuda")
    target = torch.empty(2 * MEGA).pin_memory()

    def step() -> None:
        work()
        target.copy_(source, non_blocking=True)

    return step


def clones() -> Step:
    """Copies of 24 MiB within the device, each followed by a kernel over it."""
    import torch

    source = torch.rand(6 * MEGA, device="cuda")
    targets = [torch.empty_like(source) for _ in range(2)]

    def step() -> None:
        for one in targets:
            one.copy_(source)
            one.mul_(2.0)
            one.sqrt_()

    return step


def results() -> Step:
    """64 KiB to pageable memory, new each time, behind half a millisecond of kernels."""
    import torch

    work, source = layers(2048, 12, 1536), torch.rand(MEGA // 64, device="cuda")

    def step() -> None:
        work()
        source.cpu()

    return step


def bursts() -> Step:
    """Some kernels at a time, and then a millisecond without any."""
    import torch

    work = layers(1536, 6, 1024)

    def step() -> None:
        work()
        torch.cuda.synchronize()
        time.sleep(0.001)

    return step


def sets() -> Step:
    """Sets of 24 MiB, by the runtime, between reductions."""
    import torch

    cudart, x = runtime(), torch.rand(1024, 8192, device="cuda")
    target = torch.empty(24 * MEGA, dtype=torch.uint8, device="cuda")
    words = [ctypes.c_void_p(target.data_ptr()), 0, ctypes.c_size_t(target.numel())]

    def step() -> None:
        torch.softmax(x, 1)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if cudart.cudaMemsetAsync(*words, stream):
            raise RuntimeError("cudaMemsetAsync failed")

    return step


UNSEEN: dict[str, Callable[[], Step]] = {
    one.__name__: one
    for one in (
        *(convolutions, graph_long, uploads, embeddings, graph_short, attention, reductions),
        *(downloads, cnn_training, clones, precise, graph_uploads, experts, bursts, results),
        *(sets, recurrent),
    )
}
"""Those of the most kinds first: where time runs out, the last ones are left out."""
