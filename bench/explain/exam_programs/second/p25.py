# SPDX-License-Identifier: Apache-2.0
"""Protein-like sequences of many lengths, one captured plan per length."""
import collections
import torch
import torch.nn.functional as F
from rig import Kit, DEV


class Plans:
    """small store of ready plans, oldest goes first"""
    def __init__(self, kit, net, room, bs, d):
        self.kit, self.net, self.room, self.bs, self.d = kit, net, room, bs, d
        self.have = collections.OrderedDict()

    def make(self, n):
        x = torch.zeros(self.bs, n, self.d, device=DEV)
        out = torch.zeros(self.bs, self.d, device=DEV)
        play = self.kit.graph(lambda: out.copy_(self.net(x).mean(1)), warm=2)
        return x, out, play

    def get(self, n):
        if n not in self.have:
            self.have[n] = self.make(n)
            while len(self.have) > self.room:
                self.have.popitem(last=False)
        return self.have[n]


class Layers(torch.nn.Module):
    def __init__(self, d, depth):
        super().__init__()
        self.f = torch.nn.ModuleList([torch.nn.Linear(d, 4 * d) for _ in range(depth)])
        self.g = torch.nn.ModuleList([torch.nn.Linear(4 * d, d) for _ in range(depth)])

    def forward(self, x):
        for f, g in zip(self.f, self.g):
            x = x + g(F.gelu(f(F.layer_norm(x, x.shape[-1:]))))
        return x


@torch.no_grad()
def main(kit):
    d, bs = kit.n(512, 8), kit.n(kit.rng.choice([8, 16]), 2)
    net = Layers(d, kit.n(kit.rng.choice([8, 12]), 1)).to(DEV).eval()
    lengths = list(range(kit.n(64, 4), kit.n(320, 8), kit.n(32, 1)))
    small, large = Plans(kit, net, len(lengths) - 2, bs, d), Plans(kit, net, len(lengths), bs, d)
    for n in lengths:
        large.get(n)
    data = torch.randn(bs, max(lengths), d, device=DEV)
    kit.cause("recompilation", kit.place(Plans.make, "self.kit.graph("), "the store has too little room: the graph of a length is captured again and again (host_code is a fair second name)")
    for it in kit.steps():
        n = lengths[it // 4 % len(lengths)]
        x, out, play = (small if kit.on else large).get(n)
        x.copy_(data[:, :n])
        play()
        if it % 4 == 3:
            out[0, 0].item()


if __name__ == "__main__":
    main(Kit(__file__))
