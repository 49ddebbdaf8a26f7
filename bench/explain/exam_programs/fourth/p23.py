# SPDX-License-Identifier: Apache-2.0
"""Streaming transducer decoding: acoustic encoder on the device, prefix beam on the host."""
import heapq
import torch
import torch.nn as nn
from rig import Job


class Beam:
    def __init__(self, width):
        self.width = width
        self.rounds = 0
        self.best = ()

    def extend(self, scores):
        """scores: list of (logp, token) rows"""
        hyps = {(): 0.0}
        for t in range(self.rounds):
            row = scores[t % len(scores)]
            new = {}
            for h, s in hyps.items():
                for lp, tok in row:
                    key = h[-6:] + (tok,)
                    v = s + lp
                    if v > new.get(key, -1e30):
                        new[key] = v
            hyps = dict(heapq.nlargest(self.width, new.items(), key=lambda kv: kv[1]))
        self.best = max(hyps, key=hyps.get)
        return self.best


class Posterior:
    """Keeps the lattice of posteriors; `rows` of it go to the host before they are reduced."""

    def __init__(self, n, v, dev):
        self.full = torch.rand(n, v, device=dev)
        self.rows = 0

    def top(self, logits):
        if self.rows:
            host = self.full[:self.rows].cpu()
            host[0, 0]
        lp, tok = logits.topk(4, -1)
        return [list(zip(a, b)) for a, b in zip(lp.tolist(), tok.tolist())]


class Encoder(nn.Module):
    def __init__(self, d, n, v):
        super().__init__()
        self.rnn_like = nn.ModuleList(nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.SiLU(), nn.Linear(4 * d, d))
                                      for _ in range(n))
        self.head = nn.Linear(d, v)

    def forward(self, x, reps):
        for _ in range(reps):
            for l in self.rnn_like:
                x = x + l(x)
        return torch.log_softmax(self.head(x[:, -8:].float().mean(0).to(x.dtype)).float(), -1)


@torch.no_grad()
def main():
    job = Job(0.46, 0.68)
    d = job.pick(768, 1024, tiny=16)
    v = 1024 if job.cuda else 32
    enc = Encoder(d, 6, v).to(job.dev, job.half)
    post = Posterior(20_000 if job.cuda else 200, v, job.dev)
    beam = Beam(job.pick(6, 8, tiny=2))
    audio = torch.randn(job.pick(24, 32, tiny=2), 256 if job.cuda else 16, d, device=job.dev, dtype=job.half)
    reps = [1]

    def step():
        logits = enc(audio, reps[0])
        beam.extend(post.top(logits))

    job.size(step, lambda n: reps.__setitem__(0, n), 1, job.rng.uniform(5, 9), 40)
    goal = job.share
    mix = job.rng.uniform(0.4, 0.6)
    # two causes, added one after the other: first alone, then both together
    need = goal / (1 - goal)
    first = need * mix
    rows = job.tune(step, lambda k: setattr(post, "rows", min(int(k), post.full.shape[0])), 3000, post.full.shape[0],
                    share=first / (1 + first), rounds=5)
    rest = need * (1 - mix)
    rounds = job.tune(step, lambda k: setattr(beam, "rounds", int(k)), 20, 4000, whole=True, rounds=5,
                      share=rest / (1 + first + rest))

    def off():
        post.rows = 0
        beam.rounds = 0

    job.show(step, off, [("host_code", "Beam.extend"), ("copies", "Posterior.top")],
             parts={"copies": round(first / (1 + need), 3), "host_code": round(rest / (1 + need), 3)})


if __name__ == "__main__":
    main()
