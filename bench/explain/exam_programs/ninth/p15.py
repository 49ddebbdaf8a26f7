# SPDX-License-Identifier: Apache-2.0
"""Video super-resolution: crops of changing size go through a residual net and come out twice as large."""
import kit
import itertools
import torch
from torch import nn


def conv(a, b):
    return nn.Conv2d(a, b, 3, padding=1)


class Body(nn.Module):
    def __init__(self, c, depth):
        super().__init__()
        self.inp = conv(3, c)
        self.parts = nn.ModuleList([nn.Sequential(conv(c, c), nn.GELU(), conv(c, c)) for _ in range(depth)])
        self.out = nn.Sequential(conv(c, 12), nn.PixelShuffle(2))

    def forward(self, x):
        h = self.inp(x)
        for p in self.parts:
            h = h + p(h)
        return self.out(h)


class Upscaler:
    def __init__(self, stage, c, depth):
        self.stage = stage
        self.net = Body(c, depth).to(stage.device, memory_format=torch.channels_last).eval()
        self.last = None
        self.bright = 0.0

    def crops(self, sizes):
        for h, w in itertools.cycle(sizes):
            yield torch.rand(1, 3, h, w, device=self.stage.device).to(memory_format=torch.channels_last)

    def enhance(self, x):
        with torch.inference_mode(), torch.autocast(self.stage.device.type, torch.bfloat16):
            return self.net(x)

    def tidy(self, n):
        """Between crops nothing of the old size is needed."""
        for _ in range(n):
            self.last = None
            if self.stage.cuda:
                torch.cuda.empty_cache()

    def frame(self, x):
        self.tidy(self.stage.times("a"))
        y = self.enhance(x)
        self.last = y
        self.bright = 0.9 * self.bright + 0.1 * y.float().mean().item()


def main():
    stage = kit.Stage(__file__, {
        "a": kit.Part("allocator", "Upscaler.tidy", kit.MIDDLE, start=0.4, least=0.01, most=1.0, alt="Upscaler.enhance"),
    }, "the cache is emptied between crops, so the driver frees and allocates again", window=0.8)
    if stage.smoke:
        sizes, c, depth = [(16, 16), (24, 16)], 16, 1
    else:
        h = stage.pick(360, 432, 480)
        sizes = [(h, 640), (h, 512), (h - 64, 768), (h + 32, 448), (h, 704)]
        c, depth = stage.pick(64, 96), stage.pick(10, 12, 16)
    up = Upscaler(stage, c, depth)
    for x in up.crops(sizes):
        up.frame(x)
        if not stage.tick():
            break
    stage.leave()


if __name__ == "__main__":
    main()
