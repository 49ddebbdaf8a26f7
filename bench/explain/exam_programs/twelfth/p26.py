# SPDX-License-Identifier: Apache-2.0
"""Latent upscaling: uploads on one stream, the network on another, results fetched late."""
import stage
import contextlib
import threading
import time

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.inp = nn.Conv2d(4, width, 3, padding=1)
        self.mid = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))
        self.out = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x):
        h = self.inp(x)
        for conv in self.mid:
            h = h + 0.2 * F.silu(conv(h))
        return self.out(h)


class Uploader:
    """The next chunk travels while the present one is worked on."""

    def __init__(self, dev, chunks):
        self.dev, self.chunks, self.at = dev, chunks, 0
        self.stream = torch.cuda.Stream() if dev == "cuda" else None
        self.slots = [torch.empty_like(chunks[0], device=dev) for _ in range(2)]
        self.upload()

    def upload(self):
        slot = self.slots[self.at % 2]
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext():
            slot.copy_(self.chunks[self.at % len(self.chunks)], non_blocking=True)
        self.at += 1

    def wait_and_swap(self):
        ready = self.slots[(self.at - 1) % 2]
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)
        self.upload()
        return ready


def idle_lock(lock):
    """Holds its own lock for long; nobody else wants it."""
    while True:
        with lock:
            time.sleep(0.05)


class Render:
    def __init__(self, args):
        tiny, dev = args.smoke, args.device
        kind = torch.float32 if tiny else torch.bfloat16
        self.net = Net(8 if tiny else 256, 2 if tiny else 12).to(dev, kind)
        shape = (1, 4, 24, 24) if tiny else (24, 4, 80, 80)
        chunks = [torch.randn(shape).to(kind) for _ in range(4)]
        self.back = [torch.empty(shape, dtype=kind) for _ in range(2)]
        if not tiny:
            self.net = self.net.to(memory_format=torch.channels_last)
            chunks = [c.pin_memory() for c in chunks]
            self.back = [b.pin_memory() for b in self.back]
            torch.backends.cudnn.benchmark = True
        self.up, self.turn, self.quality = Uploader(dev, chunks), 0, 0.0

    def step(self):
        x = self.up.wait_and_swap()
        y = self.net(x)
        self.back[self.turn % 2].copy_(y, non_blocking=True)
        self.quality = y.float().square().mean().item()
        self.turn += 1


@torch.no_grad()
def main():
    args = stage.arguments()
    torch.manual_seed(args.seed)
    render = Render(args)
    threading.Thread(target=idle_lock, args=(threading.Lock(),), name="lock-holder", daemon=True).start()
    stage.conduct(args, render.step)


if __name__ == "__main__":
    main()
