# SPDX-License-Identifier: Apache-2.0
"""Fraud scoring on tables: a window of transactions is assembled on the host, then a wide net is trained on it."""
import mmap
import threading
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import stage


class Window:
    """The last transactions, laid out as one table of float32 rows."""

    def __init__(self, seed, most, width):
        self.log = np.random.default_rng(seed).random((most, width), dtype=np.float32)
        self.width, self.rows, self.keep = width, 2048, None
        self.lock = threading.Lock()

    def table(self, rows):
        if self.keep is not None:
            if len(self.keep) < rows:
                self.keep = self.blank(rows)
                self.keep[:] = 0
            return self.keep[:rows]
        return self.blank(rows)

    def blank(self, rows):
        area = mmap.mmap(-1, rows * self.width * 4)
        return np.frombuffer(area, dtype=np.float32).reshape(rows, self.width)

    def assemble(self):
        with self.lock:
            out = self.table(self.rows)
            np.copyto(out, self.log[: self.rows])
        return out


class Wide(nn.Module):
    def __init__(self, width, d, depth):
        super().__init__()
        self.inp = nn.Linear(width, d)
        self.mid = nn.ModuleList(nn.Linear(d, d) for _ in range(depth))
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        h = F.relu(self.inp(x))
        for m in self.mid:
            h = h + F.relu(m(h))
        return self.out(h).squeeze(-1)


def refresher(window):
    """Looks now and then whether the log must be compacted."""
    while True:
        time.sleep(0.5)
        with window.lock:
            pass


def main():
    st = stage.Stage()
    dev = st.device
    width, batch = 64, st.pick(16384, 128)
    window = Window(st.seed, st.pick(400_000, 20_000), width)
    net = Wide(width, st.pick(2048, 32), st.pick(10, 2)).to(dev)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=not st.smoke)
    base = torch.randn(batch, width)
    stat = torch.zeros(width)
    if not st.smoke:
        base, stat = base.pin_memory(), stat.pin_memory()
    y = (torch.rand(batch, device=dev) < 0.1).float()
    stage.background(refresher, "lock-contention", window)
    seen = {}

    def learn():
        table = window.assemble()
        stat.copy_(torch.from_numpy(table[-64:].mean(0)))
        x = base.to(dev, non_blocking=True) - stat.to(dev, non_blocking=True)
        with torch.autocast(dev, dtype=torch.bfloat16):
            score = net(x)
        loss = F.binary_cross_entropy_with_logits(score.float(), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        seen["loss"] = loss.item()

    def turn(a):
        if a:
            window.rows = max(64, int(a))
            window.keep = None
        else:
            window.keep = window.blank(window.rows)
            window.keep[:] = 0

    knob = stage.Knob("memory", "Window.assemble", turn, st.pick(20_000, 2000), "light", alt="Window.blank",
                      top=st.pick(400_000, 20_000), follow=True)
    st.perform(learn, [knob])


if __name__ == "__main__":
    main()
