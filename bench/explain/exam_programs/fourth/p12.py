# SPDX-License-Identifier: Apache-2.0
"""Byte-level language model training with a live statistics board kept by a second Python thread."""
import threading
import time
import torch
import torch.nn as nn
import torch.nn.functional as F
from rig import Job


class Board:
    def __init__(self):
        self.counts = {}
        self.burst = 0.0
        self.period = 0.03
        self.open = True
        self.thread = threading.Thread(target=self.keep, name="file-sync", daemon=True)

    def roll(self, until):
        c = self.counts
        i = 0
        while time.perf_counter() < until:
            for j in range(200):
                i = (i * 1103515245 + 12345 + j) & 0xFFFF
                c[i] = c.get(i, 0) + 1
        return i

    def keep(self):
        while self.open:
            t = time.perf_counter()
            if self.burst > 0:
                self.roll(t + self.burst)
            time.sleep(max(0.001, self.period - (time.perf_counter() - t)))


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.dn = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, -1, 64 if d >= 64 else d).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, d))
        return x + self.dn(F.gelu(self.up(self.n2(x))))


class ByteLM(nn.Module):
    def __init__(self, d, depth):
        super().__init__()
        self.emb = nn.Embedding(256, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(depth))
        self.head = nn.Linear(d, 256)

    def forward(self, x):
        h = self.emb(x)
        for l in self.layers:
            h = l(h)
        return self.head(h)


def main():
    job = Job(0.11, 0.2)
    d = job.pick(768, 1024, tiny=32)
    net = ByteLM(d, job.pick(6, 8, tiny=1)).to(job.dev, job.half)
    opt = torch.optim.SGD(net.parameters(), lr=1e-3)
    text = torch.randint(256, (job.pick(24, 32, tiny=2), job.pick(512, 768, tiny=16) + 1), device=job.dev)
    board = Board()
    board.thread.start()

    def step():
        out = net(text[:, :-1])
        loss = F.cross_entropy(out.float().flatten(0, 1), text[:, 1:].flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        return loss.item()

    def setk(k):
        board.burst = float(k)

    job.tune(step, setk, 0.004, 0.5, secs=0.4, rounds=5)
    job.show(step, lambda: setk(0), [("gil", "Board.roll")])
    board.open = False
    board.thread.join()


if __name__ == "__main__":
    main()
