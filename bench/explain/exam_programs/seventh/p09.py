# SPDX-License-Identifier: Apache-2.0
"""LiDAR localisation: a scan is scored against map tiles under many pose hypotheses, frame by frame."""
import torch
import exam_kit
from exam_kit import Cause


class TileStore:
    """Map of landmarks around the vehicle."""

    def __init__(self, n, d, dev):
        self.dev = dev
        self.host = torch.randn(n, d)
        self.near = self.host.to(dev)
        self.fresh = 0

    def score_cache(self):
        n = self.fresh
        if n:
            self.near[:n] = self.host[:n].to(self.dev)
        return self.near


class Localiser:
    def __init__(self, rng, smoke, dev):
        self.dev = dev
        self.d = 8 if smoke else 256
        n = 256 if smoke else rng.choice([90_000, 120_000])
        self.scan = 16 if smoke else rng.choice([3072, 4096])
        self.tiles = TileStore(n, self.d, dev)
        self.lift = torch.randn(self.d, self.d, device=dev) / self.d ** 0.5
        self.pose = torch.zeros(self.d, device=dev)
        self.causes = [Cause("copies", "TileStore.score_cache", self.set_fresh, n // 8, 16, n, integer=True)]

    def set_fresh(self, a, on):
        self.tiles.fresh = int(a) if on else 0

    @torch.no_grad()
    def step(self):
        land = self.tiles.score_cache()
        pts = torch.randn(self.scan, self.d, device=self.dev) @ self.lift + self.pose
        best = torch.full((self.scan,), -1e9, device=self.dev)
        for part in land.split(32768):
            best = torch.maximum(best, (pts @ part.t()).amax(1))
        w = torch.softmax(best, 0)
        self.pose = 0.9 * self.pose + 0.01 * (w[:, None] * pts).sum(0)
        return self.pose[:3].tolist()


if __name__ == "__main__":
    exam_kit.main(Localiser, "low", "part of the unchanged map is uploaded from pageable memory at each frame")
