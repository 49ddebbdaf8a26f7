# SPDX-License-Identifier: Apache-2.0
"""Cone-beam tomography: algebraic sweeps over projection blocks, with a host canvas on which the preview is laid out."""
import mmap

from stage import Dial, arguments, conduct

import numpy as np
import torch

PAGE = mmap.PAGESIZE


class Canvas:
    """Preview pages; the layout changes with every sweep."""

    def __init__(self, amount):
        self.amount, self.inked = amount, 0

    def reuse(self, line):
        pages = self.amount()
        if pages:
            sheet = mmap.mmap(-1, pages * PAGE)
            view = np.frombuffer(sheet, dtype=np.float32)
            view[::PAGE // 4] = line[0]
            view[:line.size] = line[:view.size]
            self.inked += 1
            del view
            sheet.close()


class Sweep:
    def __init__(self, rays, voxels, blocks, slices, device, seed, canvas):
        gen = torch.Generator(device).manual_seed(seed)
        self.system = [torch.rand(rays, voxels, device=device, generator=gen) for _ in range(blocks)]
        self.seen = [torch.rand(rays, slices, device=device, generator=gen) for _ in range(blocks)]
        self.scale = [1.0 / s.sum(1, keepdim=True) for s in self.system]
        self.volume = torch.zeros(voxels, slices, device=device)
        self.canvas = canvas

    def __call__(self):
        for system, seen, scale in zip(self.system, self.seen, self.scale):
            missing = (seen - system @ self.volume).mul_(scale)
            self.volume.addmm_(system.t(), missing, alpha=0.2).clamp_(min=0.0)
        line = self.volume[:1000, 0].cpu().numpy()
        self.canvas.reuse(line)


def main():
    args = arguments()
    rays, voxels, blocks, slices = (128, 256, 2, 32) if args.smoke else (4096, 8192, 6, 512)
    pages = Dial(500 if args.smoke else 6000, hi=2_000_000, whole=True)
    with torch.no_grad():
        conduct(args, Sweep(rays, voxels, blocks, slices, args.device, args.seed, Canvas(pages)), [pages])


if __name__ == "__main__":
    main()
