# SPDX-License-Identifier: Apache-2.0
"""Photo restoration: tiles of a large image go through a small network and are toned."""
import torch
import torch.nn as nn

import exam_kit as kit


class Restore(nn.Module):
    def __init__(self, ch, depth):
        super().__init__()
        self.head = nn.Conv2d(3, ch, 3, padding=1)
        self.body = nn.Sequential(*[nn.Sequential(nn.Conv2d(ch, ch, 3, padding=1), nn.ReLU()) for _ in range(depth)])
        self.tail = nn.Conv2d(ch, 3, 3, padding=1)

    def forward(self, x):
        h = self.head(x)
        return self.tail(h + self.body(h))


class Planner:
    """Decides in which order the tiles are treated."""

    def __init__(self, tiles, seed):
        self.tiles = tiles
        self.seed = seed
        self.extra = 0

    def order(self, step):
        best, cost = 0, 0
        for k in range(self.extra):
            x, y = (k * 7 + step) % 61, (k * 13 + self.seed) % 53
            d = abs(x - 30) + abs(y - 26)
            if d > cost:
                best, cost = k, d
        return [(best + i) % self.tiles for i in range(self.tiles)]


class Tone:
    """Final look of the canvas."""

    def __init__(self, canvas):
        self.canvas = canvas
        self.buf = torch.empty_like(canvas)
        self.rounds = 0

    def grade(self):
        flat, out = self.canvas.flatten(), self.buf.flatten()
        n = flat.numel() // 32
        for r in range(self.rounds):
            at = (r % 32) * n
            torch.mul(flat[at:at + n], 1.0, out=out[at:at + n])
            flat[at:at + n].copy_(out[at:at + n])


class AsyncSleepRestorer(kit.Job):
    detail = "tile planner walks candidates in Python each step; toning passes over the canvas multiply by one"

    def __init__(self, ctx):
        self.side = ctx.pick(16, 256, 320)
        self.tiles = ctx.pick(2, 4, 6)
        self.net = Restore(ctx.pick(8, 96, 128), ctx.pick(1, 6, 8)).to(ctx.dev, ctx.dtype).eval()
        self.canvas = torch.rand(64, ctx.pick(1024, 4 << 20), device=ctx.dev)
        self.tile = torch.rand(self.tiles, 3, self.side, self.side, device=ctx.dev, dtype=ctx.dtype)
        self.planner = Planner(self.tiles, ctx.seed)
        self.tone = Tone(self.canvas)
        self.n = 0
        self.levers = [
            kit.Lever("host_code", "Planner.order", self.set_extra, ctx.share(0.17, 0.23), start=ctx.pick(50, 5000)),
            kit.Lever("device_memory_bandwidth", "Tone.grade", self.set_rounds, ctx.share(0.17, 0.23),
                      start=ctx.pick(2, 20))]

    def set_extra(self, a):
        self.planner.extra = a

    def set_rounds(self, a):
        self.tone.rounds = a

    @torch.no_grad()
    def step(self):
        order = self.planner.order(self.n)
        self.n += 1
        peak = torch.zeros((), device=self.tile.device)
        for pair in order:
            out = self.net(self.tile[pair:pair + 1])
            peak = torch.maximum(peak, out.float().amax())
        self.tone.grade()
        return peak.item()


if __name__ == "__main__":
    kit.main(AsyncSleepRestorer)
