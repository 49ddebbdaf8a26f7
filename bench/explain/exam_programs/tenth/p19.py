# SPDX-License-Identifier: Apache-2.0
"""Segmentation training that reports to a metrics thread, which folds raw events into histograms."""
import math
import queue
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import nn

import stage


class Metrics:
    """Folds events as they come; nothing is lost as long as the inbox is not full."""

    def __init__(self):
        self.inbox = queue.Queue(maxsize=1)
        self.histogram, self.detail, self.total = {}, 0, 0
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="idle")
        self.pool.submit(self.drain)

    def report(self, step):
        if self.detail:
            try:
                self.inbox.put_nowait((step, self.detail))
            except queue.Full:
                pass

    def drain(self):
        while True:
            step, n = self.inbox.get()
            self.fold(step, n)

    def fold(self, step, n):
        value = step % 97
        for i in range(n):
            value = (value * 1103515245 + 12345) & 0x7FFFFFFF
            key = value % 64
            self.histogram[key] = self.histogram.get(key, 0) + 1
        self.total += n


class Seg(nn.Module):
    def __init__(self, ch, depth):
        super().__init__()
        self.inp = nn.Conv2d(3, ch, 3, padding=1)
        self.body = nn.ModuleList(nn.Conv2d(ch, ch, 3, padding=1) for _ in range(depth))
        self.out = nn.Conv2d(ch, 8, 1)

    def forward(self, x):
        h = self.inp(x)
        for c in self.body:
            h = h + F.relu(c(h))
        return self.out(h)


def cosine(step, warm, total, top):
    if step < warm:
        return top * step / warm
    return 0.5 * top * (1 + math.cos(math.pi * min(1.0, (step - warm) / total)))


def main():
    st = stage.Stage()
    dev = st.device
    n, side = st.pick(16, 2), st.pick(128, 16)
    net = Seg(st.pick(192, 8), st.pick(10, 2)).to(dev).to(memory_format=torch.channels_last)
    opt = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    x = torch.randn(n, 3, side, side, device=dev).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 8, (n, side, side), device=dev)
    metrics = Metrics()
    stage.background(lambda: [time.sleep(0.05) for _ in iter(int, 1)], "io-sleeper")
    state = {"step": 0, "loss": 0.0}

    def train_step():
        state["step"] += 1
        metrics.report(state["step"])
        for g in opt.param_groups:
            g["lr"] = cosine(state["step"], 100, 10_000, 1e-3)
        with torch.autocast(dev, dtype=torch.bfloat16):
            logits = net(x)
        loss = F.cross_entropy(logits.float(), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        state["loss"] = loss.item()

    def turn(a):
        metrics.detail = int(a)

    knob = stage.Knob("gil", "Metrics.fold", turn, st.pick(60_000, 10_000), "heavy", alt="main.train_step")
    st.perform(train_step, [knob], settle=4)


if __name__ == "__main__":
    main()
