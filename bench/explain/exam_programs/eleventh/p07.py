# SPDX-License-Identifier: Apache-2.0
"""Multi object tracking: dense features on the device, boxes are associated on the host."""
import itertools
import math
import threading
import time

import stage
import torch
from torch import nn


def backbone(w):
    chain = [nn.Conv2d(3, w, 5, 2, 2), nn.ReLU()]
    for _ in range(6):
        chain += [nn.Conv2d(w, w, 3, 1, 1), nn.ReLU()]
    return nn.Sequential(*chain)


class Tracks:
    def __init__(self):
        self.boxes = [(i * 7 % 311, i * 13 % 173, 20 + i % 9, 30 + i % 5) for i in range(64)]
        self.pairs = 0

    @staticmethod
    def overlap(a, b):
        w = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
        h = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
        if w <= 0 or h <= 0:
            return 0.0
        return w * h / (a[2] * a[3] + b[2] * b[3] - w * h)

    def associate(self, scores):
        best = {}
        todo = itertools.islice(itertools.cycle(itertools.product(range(64), range(64))), int(self.pairs))
        for i, j in todo:
            s = self.overlap(self.boxes[i], self.boxes[j]) + math.exp(-abs(i - j)) * scores[j % len(scores)]
            if s > best.get(i, (0.0, 0))[0]:
                best[i] = (s, j)
        return best


class Tracker:
    def __init__(self, opts):
        s = opts.smoke
        self.net = backbone(8 if s else 128).to(opts.device).half() if not s else backbone(8)
        self.net.eval()
        dt = torch.float32 if s else torch.float16
        self.clip = torch.randn(2 if s else 16, 3, 64 if s else 384, 64 if s else 640, device=opts.device, dtype=dt)
        self.tracks = Tracks()
        self.rows = 0
        self.shelf = None

    def keep_features(self, maps):
        """Embeddings for late re-identification stay in main memory."""
        flat = maps.reshape(-1)
        n = min(self.rows, flat.numel())
        if n:
            self.shelf = flat[:n].cpu()

    @torch.inference_mode()
    def frame(self):
        maps = self.net(self.clip)
        scores = maps.mean((2, 3)).float().sigmoid()[0].tolist()
        self.keep_features(maps)
        return self.tracks.associate(scores)

    def set_rows(self, x):
        self.rows = int(x)

    def set_pairs(self, x):
        self.tracks.pairs = x


def heartbeat():
    while True:
        time.sleep(0.03)


def main():
    opts = stage.options()
    t = Tracker(opts)
    threading.Thread(target=heartbeat, name="dataloader-worker-0", daemon=True).start()
    stage.conduct(opts, t.frame, [
        stage.Factor("copies", "Tracker.keep_features", "", t.set_rows, 300000.0),
        stage.Factor("host_code", "Tracks.associate", "Tracks.overlap", t.set_pairs, 500.0),
    ], "pair")


if __name__ == "__main__":
    main()
