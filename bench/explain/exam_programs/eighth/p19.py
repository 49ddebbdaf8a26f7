# SPDX-License-Identifier: Apache-2.0
"""Town of language agents: each tick all agents choose an action, turns are kept as linked records."""
import gc

import torch
import torch.nn as nn

import exam_kit as kit


class Turn:
    def __init__(self, who, prev):
        self.who, self.prev, self.next = who, prev, None
        self.tags = [who, who % 7]
        if prev is not None:
            prev.next = self


class Chronicle:
    def __init__(self):
        self.heads = []
        self.tidy = False

    def seed(self, turns):
        self.heads = []
        for who in range(max(1, turns // 50)):
            t = None
            for _ in range(50):
                t = Turn(who, t)
            self.heads.append(t)

    def end_tick(self, actions):
        t = None
        for who, _ in enumerate(actions[:20]):
            t = Turn(who, t)
        if self.tidy:
            t = None
            gc.collect()
        else:
            while t is not None:
                t.next, t = None, t.prev


class Mind(nn.Module):
    def __init__(self, dim, layers):
        super().__init__()
        self.rnn = nn.ModuleList(nn.GRUCell(dim, dim) for _ in range(layers))
        self.act = nn.Linear(dim, 64)

    def forward(self, x, hs):
        out = []
        for c, h in zip(self.rnn, hs):
            x = c(x, h)
            out.append(x)
        return self.act(x), out


class NetworkTown(kit.Job):
    detail = "a full garbage collection at the end of each tick walks over the whole chronicle"

    def __init__(self, ctx):
        dim, agents = ctx.pick(32, 1024, 1536), ctx.pick(32, 8192, 12288)
        layers = ctx.pick(1, 4, 5)
        self.mind = Mind(dim, layers).to(ctx.dev).eval()
        self.x = torch.randn(agents, dim, device=ctx.dev)
        self.hs = [torch.zeros_like(self.x) for _ in range(layers)]
        self.chronicle = Chronicle()
        gc.collect()
        gc.freeze()
        self.levers = [kit.Lever("gc", "Chronicle.end_tick", self.set_turns, ctx.share(0.13, 0.18),
                                 start=ctx.pick(200, 5000), hi=1500000)]

    def set_turns(self, a):
        if a:
            self.chronicle.seed(a)
        self.chronicle.tidy = bool(a)

    @torch.no_grad()
    def step(self):
        for _ in range(2):
            logits, self.hs = self.mind(self.x, self.hs)
        acts = logits.argmax(1)[:256].tolist()
        self.chronicle.end_tick(acts)


if __name__ == "__main__":
    kit.main(NetworkTown)
