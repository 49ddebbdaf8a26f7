# SPDX-License-Identifier: Apache-2.0
"""Diffusion training; the next batch travels on a side stream while this one is learnt."""
import threading
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import stage


class Pictures(Dataset):
    def __init__(self, count, side):
        self.data = torch.randint(0, 255, (count, 3, side, side), dtype=torch.uint8)

    def __len__(self):
        return 1 << 30

    def __getitem__(self, i):
        return self.data[i % len(self.data)]


class Eps(nn.Module):
    def __init__(self, ch, depth):
        super().__init__()
        self.inp, self.out = nn.Conv2d(3, ch, 3, padding=1), nn.Conv2d(ch, 3, 3, padding=1)
        self.body = nn.ModuleList(nn.Conv2d(ch, ch, 3, padding=1) for _ in range(depth))
        self.time = nn.Linear(1, ch)

    def forward(self, x, t):
        h = self.inp(x) + self.time(t)[:, :, None, None]
        for c in self.body:
            h = h + F.silu(c(h))
        return self.out(h)


class Ahead:
    """One batch is always on its way to the device."""

    def __init__(self, loader, dev):
        self.source, self.dev = iter(loader), dev
        self.side = torch.cuda.Stream() if dev == "cuda" else None
        self.blocked_pull()

    def blocked_pull(self):
        raw = next(self.source)
        if self.side is None:
            self.nxt = raw.to(self.dev)
            return
        with torch.cuda.stream(self.side):
            self.nxt = raw.to(self.dev, non_blocking=True)

    def take(self):
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)
            self.nxt.record_stream(torch.cuda.current_stream())
        return self.nxt


def sleep_forever(lock):
    while True:
        with lock:
            time.sleep(0.05)
        time.sleep(0.01)


def main():
    st = stage.Stage()
    dev = st.device
    data = Pictures(st.pick(256, 16), st.pick(64, 16))
    loader = DataLoader(data, batch_size=st.pick(64, 4), num_workers=st.pick(2, 1), pin_memory=not st.smoke,
                        prefetch_factor=4, worker_init_fn=stage.tether, multiprocessing_context="fork")
    ahead = Ahead(loader, dev)
    net = Eps(st.pick(256, 8), st.pick(9, 2)).to(dev).to(memory_format=torch.channels_last)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=not st.smoke)
    stage.background(sleep_forever, "global-lock-holder", threading.Lock())
    seen = {"n": 0}

    def fit():
        raw = ahead.take()
        x = (raw.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)
        ahead.blocked_pull()
        t = torch.rand(len(x), 1, device=dev)
        noise = torch.randn_like(x)
        mixed = x * (1 - t[:, :, None, None]) + noise * t[:, :, None, None]
        with torch.autocast(dev, dtype=torch.bfloat16):
            guess = net(mixed, t)
        loss = F.mse_loss(guess.float(), noise)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        seen["n"] += 1
        if seen["n"] % 10 == 0:
            seen["loss"] = loss.item()

    st.perform(fit, settle=6)


if __name__ == "__main__":
    main()
