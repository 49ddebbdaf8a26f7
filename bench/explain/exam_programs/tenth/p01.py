# SPDX-License-Identifier: Apache-2.0
"""Two-tower recommender: items are ranked against a popularity table that is merged while training goes on."""
import queue
import threading
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import stage


class PopularityTable:
    """Recent popularity of every item; readers get a consistent view."""

    def __init__(self, items, seed):
        self.rng = np.random.default_rng(seed)
        self.score = self.rng.random(items, dtype=np.float32)
        self.events = self.rng.random(1 << 23, dtype=np.float32)
        self.guard = threading.RLock()
        self.inbox = queue.Queue(maxsize=1)
        self.depth, self.shadow = 20000, True
        stage.background(self._merge_loop, "idle-prefetcher")

    def touch(self, batch):
        try:
            self.inbox.put_nowait(batch)
        except queue.Full:
            pass

    def _ranked(self, n):
        recent = np.sort(self.events[:n])
        return float(recent[n // 2])

    def _merge_loop(self):
        while True:
            ids = self.inbox.get()
            if self.shadow:
                mid = self._ranked(self.depth)
                with self.guard:
                    self.score[ids] = 0.99 * self.score[ids] + 0.01 * mid
            else:
                with self.guard:
                    mid = self._ranked(self.depth)
                    self.score[ids] = 0.99 * self.score[ids] + 0.01 * mid

    def view(self, ids):
        with self.guard:
            return self.score[ids]


class Tower(nn.Module):
    def __init__(self, rows, dim, hidden):
        super().__init__()
        self.table = nn.Embedding(rows, dim)
        self.net = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(),
                                 nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, 256))

    def forward(self, ids):
        return F.normalize(self.net(self.table(ids)), dim=-1)


def main():
    st = stage.Stage()
    dev = st.device
    batch, rows = st.pick(16384, 64), st.pick(400_000, 1000)
    users = Tower(rows, st.pick(256, 16), st.pick(2048, 32)).to(dev)
    items = Tower(rows, st.pick(256, 16), st.pick(2048, 32)).to(dev)
    # tables are trained by a separate job; only the nets learn here
    params = [p for m in (users, items) for p in m.net.parameters()]
    for m in (users, items):
        m.table.weight.requires_grad_(False)
    opt = torch.optim.AdamW(params, lr=1e-4, fused=not st.smoke)
    popular = PopularityTable(rows, st.seed)
    gen = np.random.default_rng(st.seed + 1)
    stage.background(lambda: [time.sleep(0.5) for _ in iter(int, 1)], "table-lock-watch")
    history = []

    def train_step():
        ids = gen.integers(0, rows, size=(2, batch))
        popular.touch(ids[1, :512])
        u = torch.from_numpy(ids[0]).to(dev, non_blocking=True)
        with torch.autocast(dev, dtype=torch.bfloat16):
            left = users(u)
            weight = popular.view(ids[1])
            i = torch.from_numpy(ids[1]).to(dev, non_blocking=True)
            right = items(i)
            w = torch.from_numpy(weight).to(dev, non_blocking=True)
            logits = (left @ right[:4096].T).float() * 20
        target = torch.arange(logits.shape[0], device=dev) % logits.shape[1]
        loss = (F.cross_entropy(logits, target, reduction="none") * (1 + w)).mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        history.append(loss.item())
        del history[:-50]

    def turn(a):
        if a:
            popular.depth = int(a)
        popular.shadow = a == 0

    knob = stage.Knob("lock", "PopularityTable.view", turn, st.pick(300_000, 20_000), "light",
                      alt="PopularityTable._merge_loop", top=1 << 23, follow=True)
    st.perform(train_step, [knob])


if __name__ == "__main__":
    main()
