# SPDX-License-Identifier: Apache-2.0
"""Batched decoding with one CUDA graph per sequence length and a transcript on disk."""
import os
import shutil
import tempfile
from collections import OrderedDict

import torch
import torch.nn as nn

import exam_kit as kit


class Decoder(nn.Module):
    def __init__(self, dim, depth, vocab):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.up = nn.ModuleList(nn.Linear(dim, 3 * dim, bias=False) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(3 * dim, dim, bias=False) for _ in range(depth))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h = self.emb(ids)
        for u, d in zip(self.up, self.down):
            h = h + d(torch.relu(u(h)))
        return self.head(h).argmax(-1)


class Plans:
    """Ready-made launches by length, least recently used ones go."""

    def __init__(self, net, ids, cuda, keep=4):
        self.net, self.ids, self.cuda, self.keep = net, ids, cuda, keep
        self.table = OrderedDict()

    def build(self, key):
        rows = self.ids[:max(1, self.ids.shape[0] - key % 8)]
        if not self.cuda:
            self.net(rows)
            return lambda: self.net(rows), [None]
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            out = self.net(rows)
        return g.replay, [out]

    def get(self, key):
        if key not in self.table:
            if len(self.table) >= self.keep:
                self.table.popitem(last=False)
            self.table[key] = self.build(key)
        self.table.move_to_end(key)
        return self.table[key]


class Transcript:
    def __init__(self, path):
        self.fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        self.rows, self.due, self.at = 0.0, 0.0, 0

    def write(self, tokens):
        line = (" ".join(map(str, tokens)) + "\n").encode().ljust(4096, b" ")
        self.due += self.rows
        while self.due >= 1:
            self.due -= 1
            os.pwrite(self.fd, line, self.at)
            os.fdatasync(self.fd)
            self.at = (self.at + len(line)) % (8 << 20)


class Decoding(kit.Job):
    detail = "graphs are keyed by exact length, so new ones are captured all the time; each transcript row is synced"

    def __init__(self, ctx):
        dim, vocab = ctx.pick(32, 2560, 3072), ctx.pick(64, 32000)
        with ctx.dev:
            net = Decoder(dim, ctx.pick(2, 20, 22), vocab)
        self.net = net.to(ctx.dtype).eval()
        self.ids = torch.randint(0, vocab, (ctx.pick(8, 64, 96),), device=ctx.dev)
        self.dir = tempfile.mkdtemp()
        self.log = Transcript(os.path.join(self.dir, "t"))
        with torch.no_grad():
            for _ in range(3):
                self.net(self.ids)
        self.plans = Plans(self.net, self.ids, ctx.cuda)
        self.odd, self.credit, self.fresh, self.n = 0.0, 0.0, 1000, 0
        self.levers = [
            kit.Lever("recompilation", "Plans.build", self.set_odd, ctx.share(0.17, 0.23), start=0.2, hi=20.0,
                      integer=False),
            kit.Lever("io", "Transcript.write", self.set_rows, ctx.share(0.17, 0.23), start=1.0,
                      hi=20000.0, integer=False)]

    def set_odd(self, a):
        self.odd = a

    def set_rows(self, a):
        self.log.rows = a

    def length(self):
        if self.credit >= 1:
            self.credit -= 1
            self.fresh += 1
            return self.fresh
        return self.n % 2

    @torch.no_grad()
    def step(self):
        self.credit += self.odd
        for _ in range(4):
            self.n += 1
            replay, _ = self.plans.get(self.length())
            replay()
        self.log.write(self.ids[:16].tolist())

    def close(self):
        os.close(self.log.fd)
        shutil.rmtree(self.dir, ignore_errors=True)


if __name__ == "__main__":
    kit.main(Decoding)
