# SPDX-License-Identifier: Apache-2.0
"""Time-series transformer trained on resident windows; nothing is wrong with it."""
import gc
import threading
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

import exam_kit as kit


class SlowMixer(nn.Module):
    def __init__(self, dim, tokens):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.time = nn.Linear(tokens, tokens)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.time(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.ff(self.n2(x))


class BlockingQueueLoader:
    """Despite the name the windows are on the device already."""

    def __init__(self, data):
        self.data = data
        self.i = 0
        self.mutex = threading.Lock()

    def wait_for_batch(self):
        with self.mutex:
            self.i = (self.i + 1) % self.data.shape[0]
            return self.data[self.i]


class LeakyTrainer(kit.Job):
    detail = "limited by matrix products"

    def __init__(self, ctx):
        dim, tok = ctx.pick(32, 1536, 2048), ctx.pick(16, 256)
        self.net = nn.Sequential(*[SlowMixer(dim, tok) for _ in range(ctx.pick(1, 4, 6))]).to(ctx.dev, ctx.dtype)
        self.loader = BlockingQueueLoader(torch.randn(4, ctx.pick(2, 48, 64), tok, dim, device=ctx.dev,
                                                      dtype=ctx.dtype))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=1e-4, foreach=True)
        self.steps = 0
        self.quit = threading.Event()
        threading.Thread(target=self.heartbeat, name="sync-flusher", daemon=True).start()

    def heartbeat(self):
        while not self.quit.wait(0.25):
            self.alive = time.time()

    def step(self):
        x = self.loader.wait_for_batch()
        y = self.net(x)
        loss = F.mse_loss(y[:, :-1], x[:, 1:])
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        self.steps += 1
        if self.steps % 50 == 0:
            gc.collect(0)
            loss.item()

    def close(self):
        self.quit.set()


if __name__ == "__main__":
    kit.main(LeakyTrainer)
