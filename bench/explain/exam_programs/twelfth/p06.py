# SPDX-License-Identifier: Apache-2.0
"""Detection over camera frames: backbone, boxes, masks for the archive."""
import stage
import threading
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Backbone(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.mix = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))
        self.boxes = nn.Conv2d(width, 5, 1)
        self.masks = nn.Conv2d(width, 16, 1)

    def forward(self, x):
        x = self.stem(x)
        for conv in self.mix:
            x = x + 0.2 * F.silu(conv(x))
        return self.boxes(x), self.masks(x)


def overlap(a, b):
    w = min(a[2], b[2]) - max(a[0], b[0])
    h = min(a[3], b[3]) - max(a[1], b[1])
    if w <= 0 or h <= 0:
        return 0.0
    both = w * h
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


def suppress(boxes, limit, most=12):
    kept = []
    for box in boxes:
        if all(overlap(box, other) < limit for other in kept):
            kept.append(box)
            if len(kept) > most:
                kept.pop(0)
    return kept


class MaskSink:
    """Last masks, as the archive expects them: one plain array."""

    def __init__(self, lines, width):
        self.page = np.zeros((lines, width), np.float16)
        self.target = torch.from_numpy(self.page)

    def store(self, lines, count):
        while count > 0:
            part = min(count, len(lines), len(self.page))
            self.target[:part].copy_(lines[:part])
            count -= part


class Detector:
    def __init__(self, args):
        tiny, self.dev = args.smoke, args.device
        self.kind = torch.float32 if tiny else torch.bfloat16
        self.net = Backbone(16 if tiny else 256, 2 if tiny else 10).to(self.dev, self.kind)
        side = 64 if tiny else 512
        self.frames = torch.rand(2 if tiny else 16, 3, side, side).to(self.dev, self.kind)
        if not tiny:
            self.net = self.net.to(memory_format=torch.channels_last)
            self.frames = self.frames.contiguous(memory_format=torch.channels_last)
        self.width = 256 if tiny else 1024
        probe = self.net(self.frames)[1]
        lines = min(probe.numel() // self.width, 32768)
        self.sink = MaskSink(lines, self.width)
        self.dense = torch.zeros(lines, self.width, device=self.dev, dtype=torch.float16)
        self.crowd = stage.Dial(150 if tiny else 500)
        self.archive = stage.Dial(400 if tiny else 6000)
        self.seen = 0

    def run(self):
        boxes, masks = self.net(self.frames)
        scored = boxes.float().flatten(2).amax(1).flatten()
        top = scored.topk(min(64, scored.numel())).indices.cpu().tolist()
        flat = masks.half().flatten()[: self.dense.numel()].view(-1, self.width)
        self.dense[: len(flat)].copy_(flat)
        many = int(self.crowd())
        listed = [(t * 7 % 193 + k % 31, t * 3 % 101 + k % 17, t * 7 % 193 + 24 + k % 31, t * 3 % 101 + 30 + k % 17)
                  for k, t in zip(range(many), top * (many // len(top) + 1))]
        self.seen += len(suppress(listed, 0.5))
        self.sink.store(self.dense, int(self.archive()))


def archive_loop(sink):
    while True:
        time.sleep(0.2)
        sink.page[0, :8].sum()


@torch.no_grad()
def main():
    args = stage.arguments()
    torch.manual_seed(args.seed)
    detector = Detector(args)
    threading.Thread(target=archive_loop, args=(detector.sink,), name="fsync", daemon=True).start()
    stage.conduct(args, detector.run, [detector.crowd, detector.archive])


if __name__ == "__main__":
    main()
