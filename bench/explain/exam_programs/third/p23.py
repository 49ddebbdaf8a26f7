# SPDX-License-Identifier: Apache-2.0
"""Land-cover segmentation: tiles of a memory-mapped scene, cut and filtered by a producer thread."""
import os
import queue
import tempfile
import threading
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from rig import Kit, DEV


class Segmenter(nn.Module):
    def __init__(self, bands, w, depth):
        super().__init__()
        self.inp = nn.Conv2d(bands, w, 3, 1, 1)
        self.down = nn.Conv2d(w, 2 * w, 3, 2, 1)
        self.mid = nn.ModuleList([nn.Conv2d(2 * w, 2 * w, 3, 1, 1) for _ in range(depth)])
        self.up = nn.ConvTranspose2d(2 * w, w, 2, 2)
        self.out = nn.Conv2d(w, 9, 1)

    def forward(self, x):
        a = F.relu(self.inp(x))
        h = F.relu(self.down(a))
        for c in self.mid:
            h = h + F.relu(c(h))
        return self.out(a + F.relu(self.up(h)))


class SceneStrips:
    """iterates over batches of tiles; `depth` of them are kept ready"""
    def __init__(self, kit, path, shape, side, batch):
        self.kit = kit
        self.scene = np.memmap(path, np.uint8, "r", shape=shape)
        self.side, self.batch = side, batch
        self.rounds = 0
        self.ready = queue.Queue(2)
        self.r = np.random.default_rng(kit.args.seed)
        self.work = np.empty((batch, shape[0], side, side), np.float32)
        self.tmp = np.empty_like(self.work)

    def cut(self):
        for n in range(self.batch):
            y = int(self.r.integers(self.scene.shape[1] - self.side))
            x = int(self.r.integers(self.scene.shape[2] - self.side))
            self.work[n] = self.scene[:, y:y + self.side, x:x + self.side]

    def despeckle(self, part):
        w, t = self.work[part], self.tmp[part]
        np.multiply(w, 0.98, out=t)
        np.sqrt(t, out=t)
        np.multiply(t, 1.01, out=w)
        np.square(w, out=w)

    def make(self):
        self.cut()
        if self.kit.on:
            for k in range(self.rounds):
                self.despeckle(slice(k % self.batch, k % self.batch + 1))
        t = torch.from_numpy(self.work.astype(np.uint8))
        return t.pin_memory() if DEV.type == "cuda" else t

    def run(self):
        while True:
            self.ready.put(self.make())

    def __iter__(self):
        threading.Thread(target=self.run, name="metrics-exporter", daemon=True).start()
        return self

    def __next__(self):
        return self.ready.get()


def main():
    kit = Kit(__file__)
    rng = kit.rng
    side = kit.n(rng.choice([144, 160]), 16)
    batch = kit.n(rng.choice([16, 20]), 2)
    bands = rng.choice([4, 6])
    shape = (bands, kit.n(2000, 40), kit.n(2000, 40))
    fd, path = tempfile.mkstemp(suffix=".raw")
    with os.fdopen(fd, "wb") as f:
        f.write(np.random.default_rng(1).integers(1, 255, shape, dtype=np.uint8).tobytes())
    kit.at_end.append(lambda: os.remove(path))
    net = Segmenter(bands, kit.n(96, 4), kit.n(rng.choice([10, 12]), 1)).to(DEV)
    opt = torch.optim.SGD(net.parameters(), 0.01)
    torch.backends.cudnn.benchmark = True
    y = torch.randint(0, 9, (batch, side, side), device=DEV)
    best = 0.0

    def train(tiles):
        nonlocal best
        x = tiles.to(DEV, non_blocking=True).float().div_(255)
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        best = 0.9 * best + 0.1 * loss.item()

    strips = SceneStrips(kit, path, shape, side, batch)
    sample = strips.make()
    base, _ = kit.measure(lambda: train(sample))
    share = kit.share(0.22)
    fixed = kit.unit(strips.make)
    unit = kit.unit(lambda: strips.despeckle(slice(0, 1)), 40)
    strips.rounds = max(1, round((base / (1 - share) - fixed) / unit))
    kit.cause("input_pipeline", kit.place(SceneStrips.despeckle, "np.sqrt"),
              "one producer thread filters slower than the device learns", "thread metrics-exporter")
    feed = iter(strips)
    for i in kit.steps(warm=10):
        train(next(feed))


if __name__ == "__main__":
    main()
