# SPDX-License-Identifier: Apache-2.0
"""Item-to-item recommender: few rows of a huge embedding table are touched by a batch."""
import torch
import torch.nn as nn
import exam_kit
from exam_kit import Cause


class ItemTable:
    def __init__(self, rows, d, dev):
        self.w = torch.empty(rows, d, device=dev).normal_(0, 0.05)
        self.decayed = 0

    def take(self, ids):
        return self.w[ids]

    def lookup_hot_rows(self, ids):
        """Weight decay of the table."""
        if self.decayed:
            self.w[:self.decayed].mul_(1 - 1e-6)
        else:
            self.w[ids] *= 1 - 1e-6

    def put(self, ids, grad):
        self.w.index_add_(0, ids, grad, alpha=-0.01)


class Recommender:
    def __init__(self, rng, smoke, dev):
        self.dev = dev
        d = 16 if smoke else 128
        self.rows = 2000 if smoke else rng.choice([16_000_000, 20_000_000])
        self.b = 32 if smoke else 32768
        h = 16 if smoke else rng.choice([512, 640])
        self.table = ItemTable(self.rows, d, dev)
        self.tower = nn.Sequential(nn.Linear(2 * d, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 1)).to(dev)
        self.opt = torch.optim.SGD(self.tower.parameters(), lr=1e-3)
        self.causes = [Cause("device_memory_bandwidth", "ItemTable.lookup_hot_rows", self.set_decay,
                             max(self.rows // 4, 8), 4, self.rows, integer=True)]

    def set_decay(self, a, on):
        self.table.decayed = int(a) if on else 0

    def step(self):
        ids = torch.randint(0, self.rows, (self.b * 2,), device=self.dev)
        e = self.table.take(ids).requires_grad_()
        score = self.tower(e.view(self.b, -1)).squeeze(1)
        label = (ids[: self.b] & 1).float()
        loss = nn.functional.binary_cross_entropy_with_logits(score, label)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.table.put(ids, e.grad)
        self.table.lookup_hot_rows(ids)
        return loss.item()


if __name__ == "__main__":
    exam_kit.main(Recommender, "high", "weight decay streams the whole table though only the touched rows need it")
