# SPDX-License-Identifier: Apache-2.0
"""Actor-critic rollouts with a running return distribution for the dashboard."""
import threading
import time
from collections import deque

import torch
import torch.nn as nn

import exam_kit as kit


class Critic(nn.Module):
    def __init__(self, obs, width, depth):
        super().__init__()
        self.inp = nn.Linear(obs, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
                                    for _ in range(depth))
        self.pi = nn.Linear(width, 12)
        self.v = nn.Linear(width, 1)

    def forward(self, x):
        h = torch.tanh(self.inp(x))
        for b in self.blocks:
            h = h + b(h)
        return self.pi(h), self.v(h).squeeze(-1)


class Returns:
    """Keeps a window of returns and its quantiles for the dashboard."""

    def __init__(self, keep):
        self.window = deque((i * 37 % 1009) / 1009.0 for i in range(keep))
        self.keep = keep
        self.span = 0
        self.bins = [0] * 64
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.loop, name="cuda-prefetch", daemon=True)
        self.thread.start()

    def add(self, r):
        self.window.append(r)
        if len(self.window) > self.keep:
            self.window.popleft()

    def refresh(self, rows):
        bins = [0] * 64
        seen = 0
        while seen < rows:
            for i in range(min(512, rows - seen)):
                v = ((seen + i) * 37 % 1009) / 1009.0
                b = int(v * 63.0)
                bins[b] = bins[b] + 1
            seen += 512
        self.bins = bins

    def loop(self):
        while not self.stop.is_set():
            if self.span:
                self.refresh(self.span)
            time.sleep(0.004)


class Rollout(kit.Job):
    detail = "dashboard thread recomputes its histogram in pure Python over and over while the rollout loop launches"

    def __init__(self, ctx):
        self.n, self.obs = ctx.pick(8, 48, 64, 96), 64
        self.net = Critic(self.obs, ctx.pick(32, 256, 384), ctx.pick(2, 14, 18)).to(ctx.dev).eval()
        self.dyn = torch.randn(12, self.obs, device=ctx.dev) * 0.1
        self.state = torch.randn(self.n, self.obs, device=ctx.dev)
        self.returns = Returns(2000)
        self.levers = [kit.Lever("gil", "Returns.refresh", self.set_span, ctx.share(0.43, 0.57),
                                 start=500 if ctx.smoke else 20000, alt="Rollout.act")]

    def set_span(self, a):
        self.returns.span = a

    @torch.no_grad()
    def act(self):
        logits, value = self.net(self.state)
        a = torch.distributions.Categorical(logits=logits, validate_args=False).sample()
        self.state = torch.tanh(self.state + self.dyn[a])
        return a, value

    def step(self):
        for _ in range(2):
            a, value = self.act()
        self.returns.add(value.mean().item())

    def close(self):
        self.returns.stop.set()


if __name__ == "__main__":
    kit.main(Rollout)
