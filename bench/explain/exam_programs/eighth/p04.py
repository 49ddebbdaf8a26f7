# SPDX-License-Identifier: Apache-2.0
"""Two-rank data-parallel text classifier; gradients are averaged over gloo."""
import os
import shutil
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import exam_kit as kit


class Bag(nn.Module):
    def __init__(self, vocab, dim, hidden, classes):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, dim, mode="mean")
        self.emb.weight.requires_grad_(False)
        self.ff = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(),
                                nn.Linear(hidden, classes))

    def forward(self, ids):
        return self.ff(self.emb(ids))


class Docs:
    """Documents of one shard, cleaned before they are used."""

    def __init__(self, seed, vocab, length, batch):
        self.rng = np.random.default_rng(seed)
        self.vocab, self.length, self.batch = vocab, length, batch
        self.pool = self.rng.integers(0, vocab, (8, batch, length))
        self.i = 0

    def clean(self, long_docs):
        hits = 0
        for d in range(long_docs):
            h = 17
            for tok in range(60):
                h = (h * 31 + tok + d) & 0xFFFF
            hits += h & 1
        return hits

    def batch_of(self, long_docs):
        ids = self.pool[self.i % 8]
        self.i += 1
        self.clean(long_docs)
        return torch.from_numpy(ids), torch.from_numpy(ids[:, 0] % 16)


class Trainer:
    def __init__(self, rank, where, cfg):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method="file://" + where, rank=rank, world_size=2)
        self.dev = torch.device(cfg["dev"])
        torch.manual_seed(1)
        self.net = Bag(cfg["vocab"], cfg["dim"], cfg["hidden"], 16).to(self.dev)
        self.docs = Docs(cfg["seed"] + rank, cfg["vocab"], cfg["length"], cfg["batch"])
        self.dense = list(self.net.ff.parameters())
        self.opt = torch.optim.SGD(self.dense, lr=1e-3)

    def average(self):
        flat = torch.cat([p.grad.flatten() for p in self.dense]).cpu()
        dist.all_reduce(flat)
        flat = flat.to(self.dev).div_(2)
        at = 0
        for p in self.dense:
            p.grad.copy_(flat[at:at + p.numel()].view_as(p))
            at += p.numel()

    def step(self, long_docs):
        ids, y = self.docs.batch_of(long_docs)
        loss = F.cross_entropy(self.net(ids.to(self.dev)), y.to(self.dev))
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.average()
        self.opt.step()


def peer(where, cfg, long_docs):
    t = Trainer(1, where, cfg)
    while True:
        t.step(int(long_docs.value))


class Shards(kit.Job):
    detail = "rank 1's shard holds the long documents; rank 0 waits for it in the all-reduce"
    settle_steps = 4

    def __init__(self, ctx):
        self.dir = tempfile.mkdtemp()
        cfg = dict(dev=str(ctx.dev), vocab=ctx.pick(100, 50000), dim=ctx.pick(16, 512, 768), seed=ctx.seed,
                   hidden=ctx.pick(32, 1024, 1536), length=ctx.pick(8, 64), batch=ctx.pick(16, 1024, 2048))
        self.long_docs = kit.shared(0)
        where = os.path.join(self.dir, "store")
        kit.spawn(peer, where, cfg, self.long_docs)
        self.trainer = Trainer(0, where, cfg)
        self.levers = [kit.Lever("straggler_rank", "Trainer.average", self.set_docs, ctx.share(0.23, 0.32),
                                 start=ctx.pick(20, 1000), alt="Docs.clean (rank 1)")]

    def set_docs(self, a):
        self.long_docs.value = a

    def step(self):
        self.trainer.step(0)

    def close(self):
        kit.stop_children()
        shutil.rmtree(self.dir, ignore_errors=True)


if __name__ == "__main__":
    kit.main(Shards)
