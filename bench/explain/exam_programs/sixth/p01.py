# SPDX-License-Identifier: Apache-2.0
"""Click-through ranking model (DLRM-like) trained on a rolling pool of impressions."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import exam_kit as kit

job = kit.Job("p01")
BATCH = job.size([6144, 8192, 10240], 32)
DIM = job.size([64, 96, 128], 8)
FIELDS = job.size(20, 3)
VOCAB = job.size(400_000, 1000)
WIDTH = job.size([1536, 2048], 16)


class Catalog:
    """Maps raw item ids to compacted embedding rows; refreshed by the merchandising export."""

    def __init__(self, vocab, dev):
        self.dev = dev
        size = job.size(12_000_000, 4000)
        self.table = np.random.default_rng(job.seed).integers(0, vocab, size)
        self.resident = torch.from_numpy(self.table).to(dev)
        self.live = 1000
        self.follow_export = False

    def compact(self, raw):
        if self.follow_export:
            table = torch.from_numpy(self.table[:self.live]).to(self.dev)
        else:
            table = self.resident[:self.live]
        return table[raw % self.live]


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.bottom = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
                                    nn.Linear(WIDTH, DIM))
        k = FIELDS + 1
        self.top = nn.Sequential(nn.Linear(k * k + DIM, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
                                 nn.Linear(WIDTH, 1))

    def forward(self, dense, rows):
        e = self.emb(rows)
        d = self.bottom(dense)
        z = torch.cat([d[:, None], e], 1)
        inter = torch.bmm(z, z.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([inter, d], 1)).squeeze(1)


class LockstepTrainer:
    def __init__(self):
        self.model = Ranker().to(job.dev)
        dense = [p for n, p in self.model.named_parameters() if not n.startswith("emb")]
        self.opt = torch.optim.Adagrad(dense, lr=0.01, foreach=True)
        self.catalog = Catalog(VOCAB, job.dev)
        g = torch.Generator(device=job.dev).manual_seed(job.seed)
        self.pool = [(torch.randn(BATCH, 64, device=job.dev, generator=g),
                      torch.randint(0, 1 << 40, (BATCH, FIELDS), device=job.dev, generator=g),
                      torch.rand(BATCH, device=job.dev, generator=g).round()) for _ in range(8)]
        self.i = 0
        self.model.emb.weight.requires_grad_(False)
        self.running = torch.zeros((), device=job.dev)

    def train_step(self):
        dense, raw, click = self.pool[self.i % len(self.pool)]
        self.i += 1
        rows = self.catalog.compact(raw)
        loss = F.binary_cross_entropy_with_logits(self.model(dense, rows), click)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        self.running.mul_(0.99).add_(loss.detach(), alpha=0.01)


def main():
    t = LockstepTrainer()

    def export(n, on):
        t.catalog.live, t.catalog.follow_export = int(n), on
    c = kit.Cause("copies", "Catalog.compact", export, job.share(0.23, 0.31), job.size(1_000_000, 1000), 1000,
                  job.size(12_000_000, 4000))
    kit.examine(job, [c], "the id table is uploaded from pageable host memory in every step although it never changes",
                step=t.train_step)


if __name__ == "__main__":
    main()
