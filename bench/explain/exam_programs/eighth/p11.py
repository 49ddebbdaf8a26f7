# SPDX-License-Identifier: Apache-2.0
"""Satellite mosaics: each pass is classified on the device and handed over in a frame area."""
import mmap

import numpy as np
import torch
import torch.nn as nn

import exam_kit as kit


class Frames:
    """Areas in which finished rasters are laid out; a page carries a stamp at its head."""

    PAGE = 4096

    def __init__(self):
        self.pages = 64
        self.fresh = False
        self.kept = self.area()

    def area(self):
        return mmap.mmap(-1, self.pages * self.PAGE)

    def lay_out(self, tag):
        if self.fresh:
            area = self.area()
        else:
            area = self.kept
        view = np.frombuffer(area, dtype=np.uint8)[::self.PAGE]
        view[:] = tag & 0xFF
        total = int(view[:16].sum())
        del view
        if self.fresh:
            area.close()
        return total

    def resize(self, pages):
        self.fresh = bool(pages)
        if pages:
            self.pages = max(64, pages)
        else:
            self.kept = self.area()


class LandCover(nn.Module):
    def __init__(self, bands, width, depth):
        super().__init__()
        self.inp = nn.Linear(bands, width)
        self.hid = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.out = nn.Linear(width, 11)

    def forward(self, x):
        h = torch.relu(self.inp(x))
        for l in self.hid:
            h = torch.relu(l(h))
        return self.out(h).argmax(-1)


class GpuContention(kit.Job):
    detail = "a new anonymous shared mapping per pass: each page is faulted in and zeroed again"

    def __init__(self, ctx):
        self.net = LandCover(13, ctx.pick(16, 1024, 1536), ctx.pick(1, 6, 8)).to(ctx.dev, ctx.dtype).eval()
        self.pixels = torch.rand(ctx.pick(500, 131072, 196608), 13, device=ctx.dev, dtype=ctx.dtype)
        self.frames = Frames()
        self.tag = 0
        self.levers = [kit.Lever("memory", "Frames.lay_out", self.frames.resize, ctx.share(0.13, 0.18),
                                 start=ctx.pick(64, 3000), hi=400000)]

    @torch.no_grad()
    def step(self):
        classes = self.net(self.pixels)
        counts = torch.bincount(classes, minlength=11).tolist()
        self.tag += 1
        self.frames.lay_out(self.tag + counts[0])


if __name__ == "__main__":
    kit.main(GpuContention)
