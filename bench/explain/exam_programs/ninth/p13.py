# SPDX-License-Identifier: Apache-2.0
"""Lidar segmentation: sweeps are gathered on the host, a point-wise net labels them, ground points are dropped."""
import kit
import mmap
import numpy as np
import torch
from torch import nn


class Spinner:
    """The sensor's driver: the headers of a sweep's packets are written into a raw page."""

    def __init__(self, points):
        self.raw = np.random.default_rng(0).standard_normal((points, 4), dtype=np.float32)
        self.header = np.arange(32, dtype=np.uint8)
        self.kept = None

    def paint(self, page, packets):
        page[:packets * 4096].reshape(packets, 4096)[:, :32] = self.header

    def sweep(self, size, kept):
        packets = size // 4096
        if kept:
            if self.kept is None or len(self.kept) < size:
                self.kept = np.ones(size + (size >> 2), np.uint8)
            self.paint(self.kept, packets)
            return self.raw
        room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        page = np.frombuffer(room, dtype=np.uint8)
        self.paint(page, packets)
        del page
        return self.raw


class PointNet(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.inp = nn.Linear(4, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.out = nn.Linear(width, 8)

    def forward(self, points, cull):
        h = self.inp(points)
        for layer in self.layers:
            h = torch.relu(layer(h)) + h
            cull(h)
        return self.out(h)


class Labeller:
    def __init__(self, stage, points, width, depth):
        self.stage, self.depth = stage, depth
        self.spinner = Spinner(points)
        self.net = PointNet(width, depth).to(stage.device).eval()
        self.pinned = torch.zeros(points, 4, pin_memory=stage.cuda)
        self.ground = 0

    def cull(self, h):
        flat = h[:2048, 0]
        for _ in range(self.stage.times("b", 1.0 / self.depth)):
            self.ground += len(flat[flat > 0])

    @torch.inference_mode()
    def frame(self):
        raw = self.spinner.sweep(max(4096, int(self.stage.size("a"))), not self.stage.on("a"))
        self.pinned.numpy()[:] = raw
        points = self.pinned.to(self.stage.device, non_blocking=True)
        label = self.net(points, self.cull).argmax(1)
        return torch.bincount(label, minlength=8).tolist()


if __name__ == "__main__":
    stage = kit.Stage(__file__, {
        "a": kit.Part("memory", "Spinner.paint", kit.PAIR, start=24e6, tiny=1e5, alt="Spinner.sweep", least=1e5, most=1 << 30, moving=True),
        "b": kit.Part("synchronization", "Labeller.cull", kit.PAIR, start=24, tiny=4, least=0.5),
    }, "every sweep touches fresh pages; boolean indexing between the layers reads sizes back")
    points = stage.pick(100_000, 130_000, 160_000) if not stage.smoke else 500
    labeller = Labeller(stage, points, stage.pick(384, 512) if not stage.smoke else 16, stage.pick(12, 16) if not stage.smoke else 2)
    torch.set_float32_matmul_precision("high")
    counts = [0] * 8
    while True:
        counts = [a + b for a, b in zip(counts, labeller.frame())]
        if not stage.tick():
            break
    stage.leave()
