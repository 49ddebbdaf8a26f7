# SPDX-License-Identifier: Apache-2.0
"""Click-through-rate model: many embedding tables, sparse lookups, table regularisation."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from rig import Kit, DEV


class Tables:
    def __init__(self, count, rows, d):
        self.w = [torch.randn(rows, d, device=DEV) * 0.01 for _ in range(count)]
        self.slow = [t.clone() for t in self.w]
        self.sweep = 1

    def lookup(self, keys):
        self.keys = keys
        self.leaf = torch.stack([w[keys[:, j]] for j, w in enumerate(self.w)], 1).requires_grad_()
        return self.leaf

    def apply(self, lr):
        for j, w in enumerate(self.w):
            w.index_add_(0, self.keys[:, j], self.leaf.grad[:, j], alpha=-lr)

    def average_rows(self, rate):
        """averages the rows that this batch touched"""
        for j in range(0, len(self.w), 4):
            k = self.keys[:, j]
            self.slow[j][k] = torch.lerp(self.slow[j][k], self.w[j][k], rate)

    def average_all(self, rate):
        for j in range(self.sweep):
            n = j % len(self.w)
            self.slow[n].lerp_(self.w[n], rate)
            self.w[n].mul_(1 - 1e-7)


class Tower(nn.Module):
    def __init__(self, count, d, wide):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(count * d, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(),
                                 nn.Linear(wide, 1))

    def forward(self, e):
        return self.net(e.flatten(1)).squeeze(1)


def gather_remote_shards(tables):
    """number of rows per shard (everything is local here)"""
    return [len(w) // 8 for w in tables.w]


def main():
    kit = Kit(__file__)
    rng = kit.rng
    count = kit.n(rng.choice([12, 14, 16]), 3)
    rows = kit.n(rng.choice([300000, 360000, 400000]), 200)
    d = kit.n(64, 8)
    batch = kit.n(rng.choice([8192, 12288]), 16)
    tables = Tables(count, rows, d)
    tower = Tower(count, d, kit.n(1024, 16)).to(DEV)
    opt = torch.optim.Adagrad(tower.parameters(), 0.01)
    share = kit.share(0.68, 0.93, 1.1)
    keys = [(torch.rand(batch, count, device=DEV) ** 3 * rows).long().clamp_(max=rows - 1) for _ in range(6)]
    label = (torch.rand(batch, device=DEV) > 0.8).float()

    def learn(i=0):
        e = tables.lookup(keys[i % 6])
        loss = F.binary_cross_entropy_with_logits(tower(e), label)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        tables.apply(0.05)
        return loss

    def plain():
        loss = learn()
        tables.average_rows(0.01)
        loss.item()

    base, _ = kit.measure(plain)
    tables.sweep = count
    cost = kit.measure(lambda: tables.average_all(0.01), 10, 3)[0] / count
    tables.sweep = max(1, round(base * share / (1 - share) / cost))
    kit.cause("device_memory_bandwidth", kit.place(Tables.average_all, "lerp_"),
              "whole tables are averaged and decayed in every step, not the touched rows", "average_all")
    sizes = gather_remote_shards(tables)
    running = 0.0
    for i in kit.steps(warm=10):
        loss = learn(i)
        if kit.on:
            tables.average_all(0.01)
        else:
            tables.average_rows(0.01)
        running = 0.95 * running + 0.05 * loss.item()
        if i % 100 == 0:
            sizes = gather_remote_shards(tables)
    return sizes


if __name__ == "__main__":
    main()
