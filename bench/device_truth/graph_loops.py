# SPDX-License-Identifier: Apache-2.0
"""Loops that are one graph each, as long as those of real programs: `bench.replay_kernels`."""

from __future__ import annotations

from collections.abc import Callable

from bench.device_truth.loops import Step, captured

READ_EVERY = 16
"""Replays of `graph_decoding` for each result that is read."""


def graph_training() -> Step:
    """A whole step of training of a transformer, captured: some 5 ms."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
    batch = torch.rand(16, 256, 768, device="cuda").bfloat16()

    def work() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(batch).float().square().mean().backward()
        optimizer.step()

    return captured(work)


def graph_denoising() -> Step:
    """Convolutions, norms and activations of a picture, captured: some milliseconds."""
    import torch
    from torch import nn

    parts: list[nn.Module] = []
    for _ in range(16):
        parts += [nn.Conv2d(256, 256, 3, padding=1), nn.GroupNorm(32, 256), nn.SiLU()]
    model = nn.Sequential(*parts).cuda().half().eval().to(memory_format=torch.channels_last)
    x = torch.rand(16, 256, 48, 48, device="cuda").half()
    x = x.to(memory_format=torch.channels_last)

    def work() -> None:
        with torch.no_grad():
            model(x)

    return captured(work)


def graph_encoding() -> Step:
    """A transformer forward, captured: some milliseconds."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).cuda().bfloat16()
    batch = torch.rand(16, 384, 1024, device="cuda").bfloat16()

    def work() -> None:
        with torch.no_grad():
            model(batch)

    return captured(work)


def graph_decoding() -> Step:
    """Products of eight rows with large weights, captured; of each sixteenth replay the result is
    read."""
    import torch

    weights = [torch.rand(4096, 4096, device="cuda").half() / 4096 for _ in range(96)]
    x = torch.rand(8, 4096, device="cuda").half()
    out = torch.empty(1, device="cuda")

    def work() -> None:
        y = x
        for one in weights:
            y = torch.relu(torch.mm(y, one))
        out.copy_(y[0, :1])

    replay, done = captured(work), 0

    def step() -> None:
        nonlocal done
        replay()
        done += 1
        if not done % READ_EVERY:
            out.item()

    return step


GRAPHS: dict[str, Callable[[], Step]] = {
    one.__name__: one for one in (graph_training, graph_denoising, graph_decoding, graph_encoding)
}
