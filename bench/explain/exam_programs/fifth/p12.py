# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python3
"""Video tagging: HD clips are brought in on one stream while the previous clip is analysed on another."""
import threading
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

import bench_kit as bk


class ResBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a = nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.b = nn.Conv2d(c, c, 3, padding=1, bias=False)

    def forward(self, x):
        return F.relu(x + self.b(F.relu(self.a(x))) * 0.1)


class Tagger(nn.Module):
    def __init__(self, c, kinds):
        super().__init__()
        self.stem = nn.Conv2d(3, c, 7, stride=2, padding=3)
        self.blocks = nn.ModuleList(ResBlock(c) for _ in range(kinds))
        self.depth = kinds
        self.head = nn.Linear(c, 400)

    def forward(self, clip):
        x = clip[:, :, ::4, ::4].to(self.stem.weight.dtype).mul_(1 / 255)
        x = F.relu(self.stem(x.contiguous(memory_format=torch.channels_last)))
        for i in range(self.depth):
            x = self.blocks[i % len(self.blocks)](x)
        return self.head(x.mean((2, 3))).mean(0)


class ClipPipeline:
    def __init__(self, o):
        self.o = o
        frames, hw, c = (2, (48, 64), 8) if o.smoke else (o.rng.choice([16, 20, 24]), (1080, 1920), 96)
        g = torch.Generator().manual_seed(o.seed)
        self.host = [torch.randint(0, 255, (frames, 3, *hw), dtype=torch.uint8, generator=g) for _ in range(2)]
        if o.gpu:
            torch.backends.cudnn.benchmark = True
            self.host = [h.pin_memory() for h in self.host]
            self.main, self.side = torch.cuda.current_stream(), torch.cuda.Stream()
            self.filled = [torch.cuda.Event() for _ in range(2)]
            self.used = [torch.cuda.Event() for _ in range(2)]
        self.room = [h.to(o.device) for h in self.host]
        dt = torch.bfloat16 if o.gpu else torch.float32
        self.net = Tagger(c, 4).to(o.device, dt, memory_format=torch.channels_last).eval()
        self.ordered, self.n = False, 0
        self.pacer = bk.Pacer(o.device)

    def bring_in(self, slot, current):
        if not self.o.gpu:
            if self.ordered:
                time.sleep(0.001)
            self.room[slot].copy_(self.host[slot])
            return
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.used[slot])
            if self.ordered:
                self.side.wait_event(self.used[current])
            self.room[slot].copy_(self.host[slot], non_blocking=True)
            self.filled[slot].record(self.side)

    @torch.no_grad()
    def lock_step(self):
        cur, nxt = self.n % 2, (self.n + 1) % 2
        self.n += 1
        if self.o.gpu:
            self.main.wait_event(self.filled[cur])
        self.tags = self.net(self.room[cur])
        if self.o.gpu:
            self.used[cur].record(self.main)
        self.bring_in(nxt, cur)
        self.pacer.tick()

    @torch.no_grad()
    def fit_depth(self, share):
        """Give the network the depth at which analysis takes (1-share)/share times the transfer."""
        dev = self.o.device

        def transfer():
            self.room[0].copy_(self.host[0], non_blocking=True)

        def analyse():
            self.net(self.room[0])

        for f in (transfer, analyse):
            bk.mean_step(f, 0.2, dev)
        tc = bk.mean_step(transfer, self.o.probe, dev)
        self.net.depth = 2
        t2 = bk.mean_step(analyse, self.o.probe, dev)
        self.net.depth = 10
        t10 = bk.mean_step(analyse, self.o.probe, dev)
        per = max((t10 - t2) / 8, 1e-6)
        self.net.depth = int(min(120, max(2, 2 + round((tc * (1 - share) / share - t2) / per))))


def main():
    o = bk.options()
    share = o.rng.uniform(0.14, 0.20)
    p = ClipPipeline(o)
    if o.gpu:
        p.fit_depth(share)
    evt = threading.Event()
    threading.Thread(target=evt.wait, name="disk-spooler", daemon=True).start()
    bk.mean_step(p.lock_step, o.probe, o.device)
    on, off = bk.two_phases(p.lock_step, o, lambda: setattr(p, "ordered", True),
                            lambda: setattr(p, "ordered", False))
    evt.set()
    bk.truth(on, off, "stream_dependency", "ClipPipeline.bring_in",
             "the transfer stream waits for the analysis of the current clip although it fills the other slot")


if __name__ == "__main__":
    main()
