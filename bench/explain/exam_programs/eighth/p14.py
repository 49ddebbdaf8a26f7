# SPDX-License-Identifier: Apache-2.0
"""Property prediction for molecules: message passing on a batch of small graphs."""
import torch
import torch.nn as nn

import exam_kit as kit


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.msg, self.upd = nn.Linear(2 * dim, dim), nn.Linear(2 * dim, dim)

    def forward(self, h, src, dst):
        m = torch.relu(self.msg(torch.cat([h[src], h[dst]], 1)))
        agg = torch.zeros_like(h).index_add_(0, dst, m)
        return h + torch.relu(self.upd(torch.cat([h, agg], 1)))


class Readout(nn.Module):
    """Mean and maximum of each molecule's atoms."""

    def __init__(self, dim, bounds, owner):
        super().__init__()
        self.bounds, self.owner = bounds, owner
        self.special = 0                       # molecules with their own treatment
        self.score = nn.Linear(2 * dim, 1)

    def forward(self, h):
        n = len(self.bounds) - 1
        idx = self.owner[:, None].expand_as(h)
        mean = torch.zeros(n, h.shape[1], device=h.device).scatter_reduce_(0, idx, h, "mean", include_self=False)
        top = torch.zeros(n, h.shape[1], device=h.device).scatter_reduce_(0, idx, h, "amax", include_self=False)
        for g in range(self.special):
            g %= n
            part = h[self.bounds[g]:self.bounds[g + 1]]
            mean[g] = part.mean(0)
            top[g] = part.amax(0)
        return self.score(torch.cat([mean, top], 1)).squeeze(1)


class UploadBoundChem(kit.Job):
    detail = "the readout treats the molecules one by one, a handful of tiny kernels each"

    def __init__(self, ctx):
        graphs, dim = ctx.pick(20, 2048, 3072), ctx.pick(16, 192, 256)
        bounds = [0]
        for _ in range(graphs):
            bounds.append(bounds[-1] + ctx.rng.randint(12, 40))
        atoms = bounds[-1]
        owner = torch.repeat_interleave(torch.arange(graphs), torch.tensor(bounds).diff())
        start = torch.tensor(bounds)[owner]
        size = torch.tensor(bounds).diff()[owner]
        src = torch.arange(atoms).repeat(4)
        dst = (start.repeat(4) + (torch.rand(atoms * 4) * size.repeat(4)).long())
        self.src, self.dst = src.to(ctx.dev), dst.to(ctx.dev)
        self.h = torch.randn(atoms, dim, device=ctx.dev)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(ctx.pick(1, 4, 5))).to(ctx.dev)
        self.readout = Readout(dim, bounds, owner.to(ctx.dev)).to(ctx.dev)
        self.levers = [kit.Lever("launch_overhead", "Readout.forward", self.set_special, ctx.share(0.43, 0.56),
                                 start=ctx.pick(2, 100))]

    def set_special(self, a):
        self.readout.special = a

    @torch.no_grad()
    def step(self):
        h = self.h
        for l in self.layers:
            h = l(h, self.src, self.dst)
        return self.readout(h).topk(8).values.tolist()


if __name__ == "__main__":
    kit.main(UploadBoundChem)
