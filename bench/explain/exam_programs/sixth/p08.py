# SPDX-License-Identifier: Apache-2.0
"""Organ segmentation of CT volumes: normalise on the host, sliding blocks through a 3-D net, mask back to the host."""
import mmap
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import exam_kit as kit

job = kit.Job("p08")
EDGE = job.size([80, 96, 112], 8)
CH = job.size([24, 32], 4)
BLOCKS = job.size([4, 6], 1)


class Net3(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv3d(1, CH, 3, padding=1)
        self.mid = nn.ModuleList(nn.Conv3d(CH, CH, 3, padding=1) for _ in range(3))
        self.z = nn.Conv3d(CH, 5, 1)

    def forward(self, x):
        x = F.relu(self.a(x))
        for m in self.mid:
            x = x + F.relu(m(x))
        return self.z(x).argmax(1).to(torch.uint8)


class Workspace:
    """Host workspace of one study: row index of the padded voxel pages."""

    def __init__(self):
        self.bytes = 1 << 20
        self.fresh = False
        self.kept = None

    def acquire(self):
        if self.fresh:
            return mmap.mmap(-1, self.bytes)
        if self.kept is None or len(self.kept) < self.bytes:
            self.kept = mmap.mmap(-1, self.bytes)
        return self.kept

    def cudnn_plan(self, volume):
        buf = self.acquire()
        view = np.frombuffer(buf, dtype=np.float32)[:self.bytes // 4]
        view[::1024] = volume.flat[0]
        corner = float(view[0])
        del view, buf
        return corner


class SegmentationQueue:
    def __init__(self):
        self.net = Net3().to(job.dev).eval()
        rng = np.random.default_rng(job.seed)
        self.studies = [rng.normal(40, 300, (BLOCKS, 1, EDGE, EDGE, EDGE)).astype(np.float32) for _ in range(2)]
        self.space = Workspace()
        self.n = 0
        self.done = None

    @torch.no_grad()
    def gpu_wait(self):
        vol = self.studies[self.n % 2]
        self.n += 1
        corner = self.space.cudnn_plan(vol)
        x = torch.from_numpy(vol).to(job.dev)
        x = (x.clamp_(-200, 300) - 50 - corner * 0) / 250
        self.done = torch.stack([self.net(b[None])[0] for b in x]).cpu().numpy()


def main():
    q = SegmentationQueue()

    def spare(n, on):
        q.space.bytes, q.space.fresh = max(1 << 14, int(n * 1e6) // 4096 * 4096), on
    c = kit.Cause("memory", "Workspace.cudnn_plan", spare, job.share(0.14, 0.19), job.size(20, 1), 0.5, 3000, paired=True)
    kit.examine(job, [c], "each study maps a fresh anonymous workspace: its pages fault in on first touch (off: kept)",
                step=q.gpu_wait, window=0.5)


if __name__ == "__main__":
    main()
