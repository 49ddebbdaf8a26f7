# SPDX-License-Identifier: Apache-2.0
"""Video anomaly detection: a history of feature frames, a predictor, and rig settings kept as text."""
import torch
import torch.nn as nn
import exam_kit
from exam_kit import Cause


class History:
    """The last frames, oldest first."""

    def __init__(self, depth, n, dev):
        self.buf = torch.zeros(depth, n, device=dev)
        self.depth = depth
        self.slide = 0
        self.at = 0

    def parse_frame(self, f):
        k = self.slide
        if k:
            self.buf[:k] = self.buf[1:k + 1].clone()
            self.buf[k] = f
        self.buf[self.at] = f
        self.at = (self.at + 1) % self.depth
        return self.buf[self.at]


class Rig:
    """Camera calibration."""

    def __init__(self, r):
        self.text = ["cam%d %s" % (i, " ".join("%.5f" % r.random() for _ in range(12))) for i in range(20000)]
        self.known = [1.0] * 8
        self.lines = 0

    def shift_history(self):
        if not self.lines:
            return self.known
        table = {}
        for line in self.text[:self.lines]:
            name, *vals = line.split()
            table[name] = [float(v) for v in vals]
        return table["cam0"][:8]


class Detector:
    def __init__(self, rng, smoke, dev):
        self.dev = dev
        n = 256 if smoke else 1 << 21
        depth = 8 if smoke else rng.choice([600, 800])
        self.b, d = (4, 32) if smoke else (4096, rng.choice([3072, 4096]))
        self.hist = History(depth, n, dev)
        self.rig = Rig(rng)
        self.net = nn.Sequential(nn.Linear(512 if not smoke else 64, d), nn.ReLU(), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 8)).to(dev)
        self.cut = self.b * (512 if not smoke else 64)
        self.n = n
        self.causes = [Cause("host_code", "Rig.shift_history", self.set_lines, 200, 2, 20000, integer=True),
                       Cause("device_memory_bandwidth", "History.parse_frame", self.set_slide, depth // 5, 1, depth // 2, integer=True)]

    def set_lines(self, a, on):
        self.rig.lines = int(a) if on else 0

    def set_slide(self, a, on):
        self.hist.slide = int(a) if on else 0

    @torch.no_grad()
    def step(self):
        gains = self.rig.shift_history()
        f = torch.randn(self.n, device=self.dev)
        old = self.hist.parse_frame(f)
        x = (f + 0.1 * old)[:self.cut].view(-1, self.net[0].in_features)
        y = self.net(x) * torch.tensor(gains).to(self.dev)
        return y.abs().max().item()


if __name__ == "__main__":
    exam_kit.main(Detector, "pair", "rig text parsed at every frame; the frame history is moved by one place instead of a ring")
