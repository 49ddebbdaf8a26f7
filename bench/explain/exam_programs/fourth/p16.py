# SPDX-License-Identifier: Apache-2.0
"""Point-cloud segmentation inference with per-scan scratch buffers."""
import threading
import torch
import torch.nn.functional as F
from rig import Job


class Arena:
    """Scratch space; `fresh` blocks are handed back to the driver after each scan."""

    def __init__(self, job):
        self.job = job
        self.fresh = 0
        self.bytes = 40_000_000 if job.cuda else 10_000

    def scratch(self):
        return [torch.empty(self.bytes + 2_097_152 * i if self.job.cuda else self.bytes, dtype=torch.uint8,
                            device=self.job.dev) for i in range(max(self.fresh, 1))]

    def recycle(self, blocks):
        blocks.clear()
        if self.fresh and self.job.cuda:
            torch.cuda.empty_cache()


class Segmenter:
    def __init__(self, job):
        self.job = job
        self.n = job.pick(60_000, 90_000, tiny=300)
        c = job.pick(512, 768, tiny=8)
        mk = lambda a, b: torch.randn(a, b, device=job.dev, dtype=job.half) / a ** 0.5
        self.w = [mk(3, c)] + [mk(c, c) for _ in range(6)] + [mk(c, 20)]
        self.pts = torch.rand(self.n, 3, device=job.dev, dtype=job.half)
        self.voxel = torch.randint(self.n // 8, (self.n,), device=job.dev)
        self.arena = Arena(job)
        self.votes = torch.zeros(self.n // 8, 20, device=job.dev)
        self.reps = 1
        self.hidden = [torch.zeros(self.n, c, device=job.dev, dtype=job.half) for _ in range(2)]

    @torch.inference_mode()
    def scan(self):
        blocks = self.arena.scratch()
        h0, h1 = self.hidden
        torch.matmul(self.pts, self.w[0], out=h0)
        for _ in range(self.reps):
            for w in self.w[1:-1]:
                torch.matmul(h0, w, out=h1)
                h1.clamp_(0, 50)
                h0, h1 = h1, h0
        out = F.softmax((h0 @ self.w[-1]).float(), 1)
        blocks[0][:1024].zero_()
        self.votes.zero_().index_add_(0, self.voxel, out)
        del out
        self.arena.recycle(blocks)
        self.job.pace(1)


def main():
    job = Job(0.22, 0.44)
    seg = Segmenter(job)
    threading.Thread(target=threading.Event().wait, name="nccl-watch", daemon=True).start()
    job.size(seg.scan, lambda n: setattr(seg, "reps", n), 2, job.rng.uniform(7, 14), 100)

    def setk(k):
        seg.arena.fresh = int(k)

    job.tune(seg.scan, setk, 6, 50, whole=True)
    job.show(seg.scan, lambda: setk(0), [("allocator", "Arena.recycle")], also="Arena.scratch")


if __name__ == "__main__":
    main()
