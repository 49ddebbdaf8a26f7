# SPDX-License-Identifier: Apache-2.0
"""Super-resolution of video chunks with a side list of frames for the muxer."""
import stage
import threading
import time
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Upscaler(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))
        self.last = nn.Conv2d(width, 12, 3, padding=1)

    def forward(self, x):
        h = self.first(x)
        for conv in self.body:
            h = h + 0.2 * F.relu(conv(h))
        return F.pixel_shuffle(self.last(h), 2)


class Muxer:
    """Keeps what the container format wants to see."""

    def __init__(self, lines, width, depth):
        self.ring = deque(np.zeros((lines, width), np.uint8) for _ in range(3))
        self.depth = depth

    def take(self, picture):
        want = int(self.depth())
        while want > 0:
            page = self.ring[0]
            part = min(want, len(picture), len(page))
            torch.from_numpy(page)[:part].copy_(picture[:part])
            self.ring.rotate(1)
            want -= part


def upscale(net, muxer, source, dev, kind, tiny):
    width = 256 if tiny else 4096
    staging = [torch.empty_like(source[0], device=dev) for _ in range(2)]
    turn = 0
    while True:
        chunk = staging[turn % 2]
        chunk.copy_(source[turn % len(source)], non_blocking=True)
        big = net(chunk.to(kind).div_(255))
        frames = big.clamp_(0, 1).mul_(255).to(torch.uint8).flatten()
        frames = frames[: frames.numel() // width * width].view(-1, width)
        level = frames[0, :64].float().mean().item()
        muxer.take(frames)
        turn += 1
        yield level


def keepalive():
    while True:
        time.sleep(0.11)


@torch.no_grad()
def main():
    args = stage.arguments()
    torch.manual_seed(args.seed)
    tiny, dev = args.smoke, args.device
    kind = torch.float32 if tiny else torch.bfloat16
    batch, high, wide = (1, 32, 48) if tiny else (6, 270, 480)
    source = [torch.randint(0, 255, (batch, 3, high, wide), dtype=torch.uint8) for _ in range(4)]
    net = Upscaler(8 if tiny else 192, 3 if tiny else 14).to(dev, kind)
    if not tiny:
        source = [s.pin_memory() for s in source]
        net = net.to(memory_format=torch.channels_last)
        torch.backends.cudnn.benchmark = True
    depth = stage.Dial(100 if tiny else 1500)
    muxer = Muxer(64 if tiny else 2048, 256 if tiny else 4096, depth)
    threading.Thread(target=keepalive, name="http-client", daemon=True).start()
    frames = upscale(net, muxer, source, dev, kind, tiny)
    stage.conduct(args, frames.__next__, [depth])


if __name__ == "__main__":
    main()
