# SPDX-License-Identifier: Apache-2.0
"""Speech vocoder frames replayed from one captured graph; healthy."""
import threading
import time

import torch
import torch.nn as nn

import exam_kit as kit


class StallingVocoder(nn.Module):
    def __init__(self, ch, depth):
        super().__init__()
        self.pre = nn.Conv1d(80, ch, 7, padding=3)
        self.res = nn.ModuleList(nn.Conv1d(ch, ch, 3, padding=2 ** (i % 4), dilation=2 ** (i % 4))
                                 for i in range(depth))
        self.post = nn.Conv1d(ch, 1, 7, padding=3)

    def forward(self, mel):
        h = self.pre(mel)
        for r in self.res:
            h = h + r(torch.nn.functional.leaky_relu(h, 0.1))
        return torch.tanh(self.post(h))


class Recapture:
    """Holds the one graph; the key never changes."""

    def __init__(self, net, mel, cuda):
        self.key = tuple(mel.shape)
        self.replay, self.out = kit.capture(lambda: net(mel), cuda)
        self.misses = 0

    def recompile_if_needed(self, shape):
        if tuple(shape) != self.key:
            self.misses += 1
            raise RuntimeError("unexpected shape")
        self.replay()
        return self.out


class SwapVocoder(kit.Job):
    detail = "graph replay, the device is busy throughout"

    def __init__(self, ctx):
        self.net = StallingVocoder(ctx.pick(8, 256, 384), ctx.pick(2, 20, 28)).to(ctx.dev, ctx.dtype).eval()
        self.mel = torch.randn(ctx.pick(1, 12, 16), 80, ctx.pick(32, 4096, 6144), device=ctx.dev, dtype=ctx.dtype)
        self.mels = torch.randn(4, *self.mel.shape, device=ctx.dev, dtype=ctx.dtype)
        with torch.no_grad():
            self.cache = Recapture(self.net, self.mel, ctx.cuda)
        self.n = 0
        self.peak = 0.0
        self.quit = threading.Event()
        for name in ("alloc-trimmer", "rank-straggler"):
            threading.Thread(target=self.retry_loop, name=name, daemon=True).start()

    def retry_loop(self):
        while not self.quit.wait(0.4):
            self.beat = time.monotonic()

    @torch.no_grad()
    def step(self):
        self.mel.copy_(self.mels[self.n % 4])
        for _ in range(2):
            wave = self.cache.recompile_if_needed(self.mel.shape)
        self.n += 1
        if self.n % 16 == 0:
            self.peak = wave.abs().amax().item()

    def close(self):
        self.quit.set()


if __name__ == "__main__":
    kit.main(SwapVocoder)
