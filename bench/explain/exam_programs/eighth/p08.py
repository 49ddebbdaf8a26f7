# SPDX-License-Identifier: Apache-2.0
"""Street-scene segmentation: overlapping windows are blended in scratch tiles."""
import torch
import torch.nn as nn

import exam_kit as kit


class Segmenter(nn.Module):
    def __init__(self, ch, depth, classes):
        super().__init__()
        self.stem = nn.Conv2d(3, ch, 3, stride=2, padding=1)
        self.body = nn.Sequential(*[nn.Sequential(nn.Conv2d(ch, ch, 3, padding=1), nn.ReLU()) for _ in range(depth)])
        self.head = nn.Conv2d(ch, classes, 1)

    def forward(self, x):
        return self.head(self.body(self.stem(x)))


class Blender:
    """Scratch tiles of one request."""

    def __init__(self, dev, floats):
        self.dev, self.floats = dev, floats
        self.tiles = 4
        self.tidy = False

    def blend(self, logits):
        row = logits.flatten()[:4096].float()
        scratch = [torch.empty(self.floats, device=self.dev) for _ in range(self.tiles)]
        for t in scratch[:4]:
            t[:row.numel()].copy_(row)
        top = torch.stack([t[:row.numel()].max() for t in scratch[:4]])
        del scratch, t
        if self.tidy and self.dev.type == "cuda":
            torch.cuda.empty_cache()
        return top


class PollingServer(kit.Job):
    detail = "scratch tiles are given back to the driver after each request and obtained anew at the next one"

    def __init__(self, ctx):
        net = Segmenter(ctx.pick(8, 96, 128), ctx.pick(1, 8, 10), 19).to(ctx.dev, ctx.dtype).eval()
        side = ctx.pick(32, 768, 896)
        self.frame = torch.rand(ctx.pick(1, 2, 3), 3, side, side, device=ctx.dev, dtype=ctx.dtype)
        with torch.no_grad():
            self.replay, self.out = kit.capture(lambda: net(self.frame), ctx.cuda)
        self.net = net
        self.blender = Blender(ctx.dev, ctx.pick(10000, 3 << 20, 4 << 20))
        self.levers = [kit.Lever("allocator", "Blender.blend", self.set_tiles, ctx.share(0.23, 0.32),
                                 start=ctx.pick(4, 16), hi=500)]

    def set_tiles(self, a):
        self.blender.tidy = bool(a)
        self.blender.tiles = max(4, a or self.blender.tiles)

    @torch.no_grad()
    def step(self):
        self.frame.mul_(0.999)
        self.replay()
        return self.blender.blend(self.out).tolist()


if __name__ == "__main__":
    kit.main(PollingServer)
