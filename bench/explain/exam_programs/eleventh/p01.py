# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning a small image classifier from a shelf of packed photographs."""
import sys
import threading
import time

import numpy as np
import stage
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

EDGE = 96 if "--smoke" not in sys.argv else 24


class PhotoShelf(Dataset):
    """Each item is unpacked, denoised and cropped on the fly."""

    def __init__(self, dial, batch):
        self.dial = dial
        self.batch = batch
        rng = np.random.default_rng(5)
        self.packed = rng.integers(0, 255, size=(64, EDGE, EDGE, 3), dtype=np.uint8)
        self.kernel = np.hanning(9).astype(np.float32)

    def __len__(self):
        return 1 << 30

    def smooth(self, row):
        return np.convolve(row, self.kernel, mode="same")

    def __getitem__(self, i):
        photo = self.packed[i % 64].astype(np.float32) / 255.0
        lines = int(self.dial[0])
        flat = photo.reshape(-1, 3 * EDGE)
        for k in range(lines):
            r = k % flat.shape[0]
            flat[r] = 0.5 * flat[r] + 0.1 * self.smooth(flat[r])
        if i & 1:
            photo = photo[:, ::-1]
        return torch.from_numpy(np.ascontiguousarray(photo.transpose(2, 0, 1))), i % 100


def conv(a, b, stride):
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))


class Net(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.body = nn.Sequential(conv(3, w, 1), conv(w, w, 1), conv(w, 2 * w, 2), conv(2 * w, 2 * w, 1),
                                  conv(2 * w, 4 * w, 2), conv(4 * w, 4 * w, 1))
        self.head = nn.Linear(4 * w, 100)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def lock_watcher(stop):
    while not stop.wait(0.2):
        time.sleep(0.05)


def main():
    opts = stage.options()
    dial = stage.Dial()
    batch = 2 if opts.smoke else 48
    net = Net(8 if opts.smoke else 64).to(opts.device)
    loader = DataLoader(PhotoShelf(dial, batch), batch_size=batch, num_workers=1 if opts.smoke else 4,
                        prefetch_factor=2, pin_memory=not opts.smoke, worker_init_fn=stage.tie_to_parent)
    sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    threading.Thread(target=lock_watcher, args=(threading.Event(),), name="lock-watcher", daemon=True).start()
    feed = iter(loader)
    seen = [0, 0.0]

    def train_one():
        x, y = next(feed)
        x = x.to(opts.device, non_blocking=True)
        y = y.to(opts.device, non_blocking=True)
        for _ in range(1 if opts.smoke else 3):
            with torch.autocast(opts.device, dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(net(x), y)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
        seen[0] += 1
        if seen[0] % 8 == 0:
            seen[1] = loss.item()

    def knob(x):
        dial[0] = x

    stage.conduct(opts, train_one, [
        stage.Factor("input_pipeline", "PhotoShelf.__getitem__", "PhotoShelf.smooth", knob, 60.0),
    ], "heavy", settle=3 if opts.smoke else 12)


if __name__ == "__main__":
    main()
