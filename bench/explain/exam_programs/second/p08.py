# SPDX-License-Identifier: Apache-2.0
"""Forecasting many series with a mixer network."""
import torch
from rig import Kit, DEV


class Mixer(torch.nn.Module):
    def __init__(self, t, c, depth):
        super().__init__()
        self.time = torch.nn.ModuleList([torch.nn.Linear(t, t) for _ in range(depth)])
        self.chan = torch.nn.ModuleList([torch.nn.Linear(c, c) for _ in range(depth)])
        self.norm = torch.nn.ModuleList([torch.nn.LayerNorm(c) for _ in range(depth)])

    def forward(self, x):
        for a, b, n in zip(self.time, self.chan, self.norm):
            x = x + a(n(x).transpose(1, 2)).transpose(1, 2).relu()
            x = x + b(x).relu()
        return x


class Gauge:
    def __init__(self):
        self.seen = {}

    def refresh(self, norms):
        for i, n in enumerate(norms):
            self.seen[i] = 0.9 * self.seen.get(i, 0.0) + 0.1 * n.item()


def main(kit):
    t, c = kit.n(128, 8), kit.n(128, 8)
    net = Mixer(t, c, kit.n(kit.rng.choice([12, 16, 20]), 2)).to(DEV)
    opt = torch.optim.AdamW(net.parameters(), 1e-4)
    x = torch.randn(kit.n(kit.rng.choice([192, 256, 320]), 4), t, c, device=DEV)
    y = x.roll(1, 1)
    gauge = Gauge()
    kit.cause("synchronization", kit.place(Gauge.refresh, ".item()"), "the norm of each parameter's gradient is read back each step")
    for it in kit.steps():
        loss = (net(x) - y).abs().mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        norms = [p.grad.norm() for p in net.parameters()]
        if kit.on:
            gauge.refresh(norms)
        opt.step()


if __name__ == "__main__":
    main(Kit(__file__))
