# SPDX-License-Identifier: Apache-2.0
"""Control policy for a swarm of robots; logs are packed by helpers on the local core."""
import os
import time
import zlib

import torch
import torch.nn as nn

import exam_kit as kit


def pack_logs(core, load, seed, ready):
    os.sched_setaffinity(0, {core})
    block = bytes((i * seed) % 251 for i in range(4096)) * 4
    size = 0
    ready.value = 1
    while True:
        n = int(load.value)
        for _ in range(n):
            size += len(zlib.compress(block, 6))
        time.sleep(0.003)


class Policy(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.enc = nn.Linear(24, dim)
        self.body = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))
        self.norm = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 6)

    def forward(self, x):
        h = self.enc(x)
        for b, n in zip(self.body, self.norm):
            h = h + torch.relu(b(n(h)))
        return torch.tanh(self.head(h))


class StreamSwarm(kit.Job):
    detail = "helper processes are bound to the very core on which the control loop launches"

    def __init__(self, ctx):
        core = sorted(os.sched_getaffinity(0))[-1]
        self.load = kit.shared(0)
        ready = [kit.shared(0) for _ in range(ctx.pick(1, 3))]
        for i, r in enumerate(ready):
            kit.spawn(pack_logs, core, self.load, i + 3, r)
        self.policy = Policy(ctx.pick(16, 128, 192, 256), ctx.pick(2, 24, 32)).to(ctx.dev).eval()
        n = ctx.pick(4, 64, 128)
        self.state = torch.randn(n, 24, device=ctx.dev)
        self.mix = torch.randn(6, 24, device=ctx.dev) * 0.1
        for _ in range(3):
            self.step()
        while not all(r.value for r in ready):
            time.sleep(0.02)
        os.sched_setaffinity(0, {core})
        self.levers = [kit.Lever("cpu_starvation", "pack_logs", self.set_load, ctx.share(0.43, 0.55),
                                 start=ctx.pick(2, 10), hi=4000, alt="StreamSwarm.step / Policy.forward (victim)")]

    def set_load(self, a):
        self.load.value = a

    @torch.no_grad()
    def step(self):
        for _ in range(4):
            act = self.policy(self.state)
            self.state = torch.sin(self.state + act @ self.mix)
        return self.state.abs().mean().item()


if __name__ == "__main__":
    kit.main(StreamSwarm)
