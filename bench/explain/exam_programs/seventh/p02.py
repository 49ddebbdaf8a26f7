# SPDX-License-Identifier: Apache-2.0
"""Molecule sampler: token by token, a recurrent net proposes, a bracket/ring rule masks what may follow."""
import numpy as np
import torch
import torch.nn as nn
import exam_kit
from exam_kit import Cause

OPEN, CLOSE, RING = 1, 2, 3


class RingBook:
    """Open brackets and rings of every molecule being written."""

    def __init__(self, prompts):
        self.seqs = prompts
        self.depth = np.zeros(len(prompts), dtype=np.int64)
        self.horizon = 0

    def append(self, tokens):
        self.depth = np.clip(self.depth + (tokens == OPEN) - (tokens == CLOSE), 0, 12)
        for s, t in zip(self.seqs, tokens.tolist()):
            s.append(t)
            if len(s) > 4000:
                del s[:1000]

    def gpu_wait_balance(self, seq):
        level = rings = 0
        for t in seq[-self.horizon:]:
            if t == OPEN:
                level += 1
            elif t == CLOSE and level:
                level -= 1
            elif t == RING:
                rings ^= 1
        return level, rings

    def allowed(self, n):
        if self.horizon:
            for i, s in enumerate(self.seqs):
                level, _ = self.gpu_wait_balance(s)
                if level > 12:
                    self.depth[i] = 12
        ok = np.ones((len(self.seqs), n), dtype=np.bool_)
        ok[self.depth == 0, CLOSE] = False
        ok[self.depth >= 12, OPEN] = False
        return ok


class Sampler:
    def __init__(self, rng, smoke, dev):
        self.dev = dev
        self.n = 4 if smoke else rng.choice([192, 256])
        d = 32 if smoke else rng.choice([5120, 6144])
        self.vocab = 64
        self.emb = nn.Embedding(self.vocab, d).to(dev)
        self.cell = nn.GRUCell(d, d).to(dev)
        self.mix = nn.Linear(d, d).to(dev)
        self.head = nn.Linear(d, self.vocab).to(dev)
        g = np.random.default_rng(rng.randrange(1 << 30))
        self.book = RingBook([g.integers(0, self.vocab, 3000).tolist() for _ in range(self.n)])
        self.tok = torch.zeros(self.n, dtype=torch.long, device=dev)
        self.h = torch.zeros(self.n, d, device=dev)
        self.causes = [Cause("host_code", "RingBook.gpu_wait_balance", self.set_horizon, 50, 1, 2900, integer=True)]

    def set_horizon(self, a, on):
        self.book.horizon = int(a) if on else 0

    @torch.no_grad()
    def step(self):
        self.h = self.cell(self.emb(self.tok), self.h)
        logits = self.head(torch.tanh(self.mix(self.h)))
        ok = torch.from_numpy(self.book.allowed(self.vocab)).to(self.dev)
        p = torch.softmax(logits.masked_fill(~ok, -1e9), -1)
        self.tok = torch.multinomial(p, 1).squeeze(1)
        self.book.append(self.tok.cpu().numpy())


if __name__ == "__main__":
    exam_kit.main(Sampler, "mid", "every molecule's whole text is scanned again in Python for each token")
