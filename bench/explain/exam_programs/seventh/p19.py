# SPDX-License-Identifier: Apache-2.0
"""Drone mapping: occupied voxels are marked in a large grid, features are matched on the device."""
import mmap
import numpy as np
import torch
import exam_kit
from exam_kit import Cause


class VoxelGrid:
    def __init__(self, size, seed):
        self.size = size
        self.g = np.random.default_rng(seed)
        self.keep = self.blank()
        self.keep[::4096] = 0
        self.cells = self.g.integers(0, size, 4_000_000)
        self.n = 0
        self.anew = False

    def blank(self):
        m = mmap.mmap(-1, self.size)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            try:
                m.madvise(mmap.MADV_NOHUGEPAGE)
            except OSError:
                pass
        return np.frombuffer(m, dtype=np.uint8)

    def device_mark(self):
        idx = self.cells[:self.n]
        if self.anew:
            grid = self.blank()
            grid[idx] = 1
            return int(grid[idx[:64]].sum())
        self.keep[idx] = 1
        hit = int(self.keep[idx[:64]].sum())
        self.keep[idx] = 0
        return hit


class Matcher:
    """Descriptors of the frame against landmarks; those outside the window do not count."""

    def __init__(self, b, n, far, d, dev):
        self.dev = dev
        self.land = torch.randn(n + far, d, device=dev)
        self.near = n
        self.q = torch.randn(b, d, device=dev)
        self.beyond = 0

    def clear_grid(self, shift):
        m = self.near + self.beyond
        best = torch.full((len(self.q),), -1e9, device=self.dev)
        for at in range(0, m, 4096):
            part = self.land[at:min(at + 4096, m)]
            s = (self.q + shift) @ part.t()
            inside = torch.arange(at, at + len(part), device=self.dev) < self.near
            best = torch.maximum(best, s.masked_fill(~inside, -1e9).amax(1))
        return best


class Mapper:
    def __init__(self, rng, smoke, dev):
        self.grid = VoxelGrid((1 << 20) if smoke else (1 << 29), rng.randrange(1 << 30))
        n, far = (256, 512) if smoke else (rng.choice([24576, 32768]), 65536)
        self.match = Matcher(16 if smoke else 4096, n, far, 32 if smoke else 1536, dev)
        self.causes = [Cause("memory", "VoxelGrid.device_mark", self.set_voxels, 100 if smoke else 8000, 20, 4_000_000, integer=True),
                       Cause("device_compute", "Matcher.clear_grid", self.set_far, n // 4, 16, far, integer=True)]

    def set_voxels(self, a, on):
        self.grid.n, self.grid.anew = int(a), on

    def set_far(self, a, on):
        self.match.beyond = int(a) if on else 0

    @torch.no_grad()
    def step(self):
        hit = self.grid.device_mark()
        return self.match.clear_grid(0.001 * hit).mean().item()


if __name__ == "__main__":
    exam_kit.main(Mapper, "pair", "a fresh grid is mapped and faulted in every frame; landmarks outside the window are matched and then masked")
