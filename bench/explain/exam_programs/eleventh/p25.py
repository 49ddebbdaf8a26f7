# SPDX-License-Identifier: Apache-2.0
"""Video upscaling: clips travel on a second stream while the present clip is enlarged."""
import asyncio
import threading
import time

import stage
import torch
from torch import nn


class Upscaler(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        self.head = nn.Conv2d(3, c, 3, padding=1)
        self.body = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1) for _ in range(n))
        self.tail = nn.Sequential(nn.Conv2d(c, 12, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, x):
        h = self.head(x)
        for b in self.body:
            h = h + b(h).relu()
        return self.tail(h)


class Courier:
    """Legitimate transfers, hidden behind the computation."""

    def __init__(self, opts, shape, dtype):
        self.cuda = opts.device == "cuda"
        self.host = torch.rand(shape).to(dtype)
        self.dev = [torch.zeros(shape, dtype=dtype, device=opts.device) for _ in range(2)]
        self.done = [None, None]
        if self.cuda:
            self.host = self.host.pin_memory()
            self.side = torch.cuda.Stream()

    def wait_and_copy(self, k):
        if not self.cuda:
            self.dev[k].copy_(self.host)
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.dev[k].copy_(self.host, non_blocking=True)
            self.done[k] = torch.cuda.Event()
            self.done[k].record(self.side)

    def take(self, k):
        if self.cuda and self.done[k] is not None:
            torch.cuda.current_stream().wait_event(self.done[k])
        return self.dev[k]


async def one_clip(net, courier, n, sums):
    courier.wait_and_copy((n + 1) % 2)
    clip = courier.take(n % 2)
    with torch.inference_mode():
        out = net(clip)
        await asyncio.sleep(0)
        sums.append(out.float().mean().item())
    del sums[:-50]


def stalled_worker():
    while True:
        time.sleep(0.5)


def main():
    opts = stage.options()
    s = opts.smoke
    dt = torch.float32 if s else torch.bfloat16
    torch.backends.cudnn.benchmark = True
    net = Upscaler(8 if s else 128, 1 if s else 8).to(opts.device, dt).eval()
    courier = Courier(opts, (1, 3, 32, 32) if s else (16, 3, 360, 640), dt)
    loop = asyncio.new_event_loop()
    for name in ("input-stall", "deadlock-check"):
        threading.Thread(target=stalled_worker, name=name, daemon=True).start()
    state = [0]
    sums = []

    def step():
        loop.run_until_complete(one_clip(net, courier, state[0], sums))
        state[0] += 1

    stage.conduct(opts, step, [])


if __name__ == "__main__":
    main()
