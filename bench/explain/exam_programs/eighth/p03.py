# SPDX-License-Identifier: Apache-2.0
"""Brute-force vector search: every query batch scans the whole half-precision index."""
import threading
import time

import torch

import exam_kit as kit


class LeakyIndex:
    """The shards of the index; every one is read once a query batch."""

    def __init__(self, shards, rows, dim, dev, dtype):
        self.shards = [torch.randn(rows, dim, device=dev, dtype=dtype) for _ in range(shards)]
        self.out = torch.empty(shards, rows, device=dev, dtype=dtype)

    def copy_and_wait(self, q):
        for i, s in enumerate(self.shards):
            torch.mv(s, q, out=self.out[i])
        return self.out


class RetrySearch(kit.Job):
    detail = "limited by reading the index; nothing to be gained"

    def __init__(self, ctx):
        self.dim = ctx.pick(32, 768, 1024)
        self.index = LeakyIndex(ctx.pick(2, 10, 12), ctx.pick(200, 400000, 500000), self.dim, ctx.dev, ctx.dtype)
        self.q = torch.randn(64, self.dim, device=ctx.dev, dtype=ctx.dtype)
        self.i = 0
        self.slow_path_hits = 0
        self.quit = threading.Event()
        self.lock = threading.Lock()
        threading.Thread(target=self.gc_sweeper, name="gil-hog", daemon=True).start()

    def gc_sweeper(self):
        while not self.quit.wait(0.5):
            with self.lock:
                self.slow_path_hits += 1

    @torch.no_grad()
    def step(self):
        scores = self.index.copy_and_wait(self.q[self.i % 64])
        self.i += 1
        val, idx = scores.max(dim=1)
        with self.lock:
            best = val.tolist()
        time.sleep(0)
        return max(best)

    def close(self):
        self.quit.set()


if __name__ == "__main__":
    kit.main(RetrySearch)
