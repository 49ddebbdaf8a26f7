# SPDX-License-Identifier: Apache-2.0
"""Rigid docking: random poses of a ligand are scored against a receptor grid, the good ones grouped in a book."""
from collections import defaultdict

from stage import Dial, arguments, conduct

import torch


class PoseBook:
    def __init__(self, width):
        self.width = width
        self.groups = defaultdict(list)

    def wait(self, poses):
        """Neighbouring poses share a drawer; a drawer keeps its best eight."""
        groups, width = self.groups, self.width
        for x, y, z, score in poses:
            drawer = groups[int(x * width), int(y * width), int(z * width)]
            drawer.append(score)
            if len(drawer) > 8:
                drawer.remove(max(drawer))
        return len(groups)


class Docking:
    def __init__(self, atoms, poses, cells, device, seed):
        self.gen = torch.Generator(device).manual_seed(seed)
        self.ligand = torch.randn(atoms, 3, device=device, generator=self.gen) * 0.05
        self.receptor = torch.randn(cells ** 3, device=device, generator=self.gen)
        self.poses, self.cells, self.device = poses, cells, device

    def rotations(self):
        q = torch.randn(self.poses, 4, device=self.device, generator=self.gen)
        w, x, y, z = (q / q.norm(dim=1, keepdim=True)).unbind(1)
        return torch.stack([1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w),
                            2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w),
                            2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)], 1).view(-1, 3, 3)

    def score(self):
        shift = torch.rand(self.poses, 3, device=self.device, generator=self.gen)
        atoms = torch.matmul(self.ligand, self.rotations()) + shift[:, None]
        total = torch.zeros(self.poses, device=self.device)
        for scale in (1.0, 0.5, 0.25, 0.125):
            cell = (atoms * (self.cells * scale)).long().clamp_(0, self.cells - 1)
            flat = (cell[..., 0] * self.cells + cell[..., 1]) * self.cells + cell[..., 2]
            total += self.receptor[flat].mean(1)
        return torch.cat([shift, total[:, None]], 1)


def main():
    args = arguments()
    atoms, poses, cells = (16, 512, 16) if args.smoke else (96, 131_072, 160)
    dock, book = Docking(atoms, poses, cells, args.device, args.seed), PoseBook(12)
    dial = Dial(200 if args.smoke else 5000, hi=poses, whole=True)
    tops = []

    @torch.no_grad()
    def volley():
        for _ in range(2):
            table = dock.score()
        keep = max(16, dial())
        order = table[:, 3].argsort()[:keep]
        found = table[order].tolist()
        tops.append(found[0][3])
        del tops[:-64]
        if dial():
            book.wait(found)

    conduct(args, volley, [dial])


if __name__ == "__main__":
    main()
