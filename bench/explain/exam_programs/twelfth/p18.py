# SPDX-License-Identifier: Apache-2.0
"""Point clouds are stamped on a sparse canvas and segmented."""
import stage
import hashlib
import mmap
import threading
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Canvas:
    """A sheet for one sweep; far larger than what is written on it."""

    def __init__(self, sheets, cells):
        self.sheets, self.cells = sheets, cells
        self.rng = np.random.default_rng(5)
        self.fixed = np.zeros(cells, np.float32)

    def stamp(self, marks):
        size = int(self.sheets() * 65536)
        if size < 65536:
            return float(marks[0])
        sheet = mmap.mmap(-1, size)
        tiles = np.frombuffer(sheet, np.uint8)
        tiles[::4096] = 1 + int(marks[0]) % 200
        total = float(tiles[: 1 << 16: 64].sum())
        del tiles
        sheet.close()
        return total

    def compose(self):
        marks = self.rng.integers(0, self.cells, 2048)
        self.fixed[marks] += 1.0
        self.fixed[0] = self.stamp(marks) % 7
        return torch.from_numpy(self.fixed)


class Segmenter(nn.Module):
    def __init__(self, width, depth, cells):
        super().__init__()
        self.lift = nn.Linear(cells, width)
        self.body = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 8)

    def forward(self, points, context):
        x = points + self.lift(context)
        for lin in self.body:
            x = x + 0.1 * F.gelu(lin(x))
        return self.head(x)


def digest_forever(block, pause):
    while True:
        hashlib.sha256(block).hexdigest()
        time.sleep(pause)


@torch.no_grad()
def main():
    args = stage.arguments()
    torch.manual_seed(args.seed)
    tiny, dev = args.smoke, args.device
    kind = torch.float32 if tiny else torch.bfloat16
    width, depth, cells, count = (64, 2, 256, 128) if tiny else (4096, 10, 4096, 16384)
    sheets = stage.Dial(4 if tiny else 150)
    canvas = Canvas(sheets, cells)
    net = Segmenter(width, depth, cells).to(dev, kind)
    points = torch.randn(count, width, device=dev, dtype=kind)
    threading.Thread(target=digest_forever, args=(bytes(1 << 20 if tiny else 1 << 23), 0.3 if tiny else 0.01),
                     name="pause-timer", daemon=True).start()

    def sweep():
        context = canvas.compose().to(dev).to(kind)
        return net(points, context).float().amax().item()

    stage.conduct(args, sweep, [sheets])


if __name__ == "__main__":
    main()
