# SPDX-License-Identifier: Apache-2.0
"""Beam search over a feed-forward acoustic decoder with fixed buffers."""
import stage
import threading
import time
from collections import deque

import torch


class BeamPool:
    """Scratch for the hypotheses of one frame; nothing is kept beyond it."""

    def __init__(self, dev, fans):
        self.dev, self.fans = dev, fans
        self.unit = 1 << 20 if dev == "cuda" else 1 << 14
        self.open = []

    def expand(self, scores):
        top = scores.amax()
        for k in range(self.fans.value):
            lattice = torch.empty((12 + 2 * (k % 5)) * self.unit // 4, device=self.dev)
            lattice[:1024].copy_(top.expand(1024))
            self.open.append(lattice)
        return torch.stack([x[0] for x in self.open]).sum()

    def settle(self):
        self.open.clear()
        if self.fans.live:
            torch.cuda.empty_cache()


class Decoder:
    def __init__(self, args):
        tiny, self.dev = args.smoke, args.device
        kind = torch.float32 if tiny else torch.bfloat16
        rows, dim, depth = (64, 128, 4) if tiny else (4096, 4096, 36)
        make = lambda *shape: torch.randn(*shape, device=self.dev).to(kind)
        self.weights = [make(dim, dim) / dim ** 0.5 for _ in range(depth)]
        self.bufs = [make(rows, dim), make(rows, dim)]
        self.start = make(rows, dim)
        self.scores = torch.empty(rows, device=self.dev, dtype=kind)
        self.fans = stage.Dial(8, hi=160, whole=True, paired=True)
        self.pool = BeamPool(self.dev, self.fans)
        self.history = deque(maxlen=200)

    def frame(self):
        src, dst = self.bufs
        src.copy_(self.start)
        for w in self.weights:
            torch.mm(src, w, out=dst)
            dst.clamp_(-3, 3)
            src, dst = dst, src
        torch.sum(src, 1, out=self.scores)
        total = self.pool.expand(self.scores)
        self.history.append(total.item())
        self.pool.settle()


def warm_copy(box):
    while True:
        time.sleep(0.1)
        box["at"] = time.time()


def main():
    args = stage.arguments()
    torch.manual_seed(args.seed)
    threading.Thread(target=warm_copy, args=({},), name="h2d-copy", daemon=True).start()
    with torch.inference_mode():
        decoder = Decoder(args)
        stage.conduct(args, decoder.frame, [decoder.fans])


if __name__ == "__main__":
    main()
