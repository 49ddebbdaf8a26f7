# SPDX-License-Identifier: Apache-2.0
"""Two-tower click model; raw string-like keys are turned into table rows on the trainer."""
import numpy as np
import torch
from torch import nn
from rig import Job


class VocabMapper:
    def __init__(self, n):
        self.n = n
        self.table = {k * 2654435761 % (1 << 40): k for k in range(n)}
        self.keys = np.fromiter(self.table.keys(), np.int64)
        self.inv = pow(2654435761, -1, 1 << 40)
        self.slow = 0

    def encode(self, raw):
        cut = min(self.slow, raw.size)
        out = np.empty(raw.size, np.int64)
        table = self.table
        n = self.n
        for j in range(cut):
            key = int(raw[j])
            row = table.get(key)
            if row is None:
                row = key % n
            out[j] = row
        rest = raw[cut:]
        if rest.size:
            # the hash is a multiplication by an odd number, hence invertible
            u = rest.astype(np.uint64) * np.uint64(self.inv)
            out[cut:] = (u & np.uint64((1 << 40) - 1)).astype(np.int64)
        return out


class Towers(nn.Module):
    def __init__(self, rows, dim, hid):
        super().__init__()
        self.emb = nn.EmbeddingBag(rows, dim, mode="sum")
        self.deep = nn.Sequential(nn.Linear(dim, hid), nn.ReLU(), nn.Linear(hid, hid), nn.ReLU(),
                                  nn.Linear(hid, hid), nn.ReLU(), nn.Linear(hid, 1))

    def forward(self, idx):
        return self.deep(self.emb(idx)).squeeze(1)


def sync_all(parts):
    # joins the partial id lists of the request shards
    return np.concatenate(parts)


class Trainer:
    def __init__(self, job):
        self.job = job
        self.batch = job.pick(4096, 6144, tiny=64)
        self.hot = job.pick(8, 10, 12, tiny=4)
        self.map = VocabMapper(job.pick(60000, 90000, tiny=500))
        self.net = Towers(self.map.n, job.pick(128, 192, tiny=16), job.pick(4096, 5120, tiny=32)).to(job.dev)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        self.rng = np.random.default_rng(1)
        self.y = (torch.rand(self.batch, device=job.dev) > 0.7).float()
        self.pool = [self.rng.choice(self.map.keys, self.batch * self.hot) for _ in range(8)]
        self.i = 0

    def one_batch(self):
        self.i += 1
        raw = self.pool[self.i % 8]
        h = raw.size // 2
        raw = sync_all([raw[:h], raw[h:]])
        idx = torch.from_numpy(self.map.encode(raw)).view(self.batch, self.hot)
        idx = idx.to(self.job.dev, non_blocking=True)
        with torch.autocast(self.job.dev.type, torch.bfloat16, enabled=self.job.cuda):
            out = self.net(idx)
        loss = nn.functional.binary_cross_entropy_with_logits(out.float(), self.y)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        self.job.pace(1)

    def setk(self, k):
        self.map.slow = int(k)


def main():
    job = Job(0.46, 0.66)
    t = Trainer(job)
    job.tune(t.one_batch, t.setk, 0.4 * t.batch * t.hot, 1 << 30)
    job.show(t.one_batch, lambda: t.setk(0), [("host_code", "VocabMapper.encode")])


if __name__ == "__main__":
    main()
