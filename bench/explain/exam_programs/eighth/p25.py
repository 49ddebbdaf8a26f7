# SPDX-License-Identifier: Apache-2.0
"""Segmentation of medical volumes: slabs go through a 3-D network, results return to the viewer."""
import torch
import torch.nn as nn

import exam_kit as kit


class VNet(nn.Module):
    def __init__(self, ch, depth):
        super().__init__()
        self.inp = nn.Conv3d(1, ch, 3, padding=1)
        self.body = nn.ModuleList(nn.Conv3d(ch, ch, 3, padding=1) for _ in range(depth))
        self.out = nn.Conv3d(ch, 4, 1)

    def forward(self, x):
        h = self.inp(x)
        for c in self.body:
            h = h + torch.relu(c(h))
        return self.out(h)


class Viewer:
    """What the radiologist sees: classes of the slab, and, formerly, raw maps."""

    def __init__(self, floats, dev):
        self.maps = torch.rand(floats, device=dev)
        self.floats = 0
        self.raw = torch.zeros(floats)

    def show(self, classes):
        if self.floats:
            self.raw[:self.floats].copy_(self.maps[:self.floats])
        return classes.tolist()


class Slabs:
    """Working buffers of a slab."""

    def __init__(self, dev, floats):
        self.dev, self.floats = dev, floats
        self.count, self.release = 4, False

    def accumulate(self, piece):
        bufs = [torch.empty(self.floats, device=self.dev) for _ in range(self.count)]
        n = piece.numel()
        for b in bufs[:4]:
            b[:n].copy_(piece)
        top = torch.stack([b[:n].amax() for b in bufs[:4]])
        del bufs, b
        if self.release and self.dev.type == "cuda":
            torch.cuda.empty_cache()
        return top


class LockstepViewer(kit.Job):
    detail = "raw maps are downloaded to pageable memory for each slab; working buffers go back to the driver each time"

    def __init__(self, ctx):
        net = VNet(ctx.pick(4, 32, 48), ctx.pick(1, 4, 6)).to(ctx.dev, ctx.dtype).eval()
        s = ctx.pick(8, 64, 80)
        self.slab = torch.rand(1, 1, s, s, s, device=ctx.dev, dtype=ctx.dtype)
        self.net = net
        with torch.no_grad():
            self.replay, self.out = kit.capture(lambda: net(self.slab), ctx.cuda)
        self.runs = ctx.pick(1, 2, 3)
        floats = ctx.pick(100000, 64 << 20)
        self.viewer = Viewer(floats, ctx.dev)
        self.slabs = Slabs(ctx.dev, ctx.pick(8192, 3 << 20))
        self.levers = [
            kit.Lever("copies", "Viewer.show", self.set_floats, ctx.share(0.17, 0.23), start=ctx.pick(5000, 2 << 20),
                      hi=floats),
            kit.Lever("allocator", "Slabs.accumulate", self.set_count, ctx.share(0.17, 0.23), start=ctx.pick(4, 12),
                      hi=500)]

    def set_floats(self, a):
        self.viewer.floats = a

    def set_count(self, a):
        self.slabs.release = bool(a)
        self.slabs.count = max(4, a or self.slabs.count)

    @torch.no_grad()
    def step(self):
        for _ in range(self.runs):
            self.slab.mul_(0.9999)
            self.replay()
        top = self.slabs.accumulate(self.out.flatten()[:4096].float())
        return self.viewer.show(top)


if __name__ == "__main__":
    kit.main(LockstepViewer)
