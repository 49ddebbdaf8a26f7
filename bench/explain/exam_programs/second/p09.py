# SPDX-License-Identifier: Apache-2.0
"""Cloth made of springs, explicit integration."""
import torch
from rig import Kit, DEV


class Cloth:
    def __init__(self, side, sub):
        g = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).float()
        self.p = torch.cat([g, torch.zeros(side, side, 1)], -1).to(DEV)
        self.v = torch.zeros_like(self.p)
        self.f = torch.zeros_like(self.p)
        self.sub = sub

    def pull(self, a, b, fa, fb):
        d = b - a
        l = d.norm(dim=-1, keepdim=True).clamp_min(1e-4)
        k = d / l * (l - 1.0) * 4.0
        fa.add_(k)
        fb.sub_(k)

    def advance(self):
        p, f = self.p, self.f
        for _ in range(self.sub):
            f.zero_()
            self.pull(p[1:], p[:-1], f[1:], f[:-1])
            self.pull(p[:, 1:], p[:, :-1], f[:, 1:], f[:, :-1])
            self.pull(p[1:, 1:], p[:-1, :-1], f[1:, 1:], f[:-1, :-1])
            f[..., 2].sub_(0.05)
            self.v.add_(f, alpha=0.01).mul_(0.995)
            self.p.add_(self.v, alpha=0.01)


def main(kit):
    cloth = Cloth(kit.n(kit.rng.choice([48, 64, 96]), 8), kit.n(kit.rng.choice([10, 16, 24]), 2))
    whole = kit.graph(cloth.advance)
    kit.cause("launch_overhead", kit.place(Cloth.advance, "self.pull(p[1:], p"), "hundreds of tiny eager kernels; the same as a graph without the cause")
    for _ in kit.steps():
        if kit.on:
            cloth.advance()
        else:
            whole()


if __name__ == "__main__":
    main(Kit(__file__))
