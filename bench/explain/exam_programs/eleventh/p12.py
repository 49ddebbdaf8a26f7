# SPDX-License-Identifier: Apache-2.0
"""Language model training in bf16 with loader workers, a loss read every step and a note taker."""
import os
import threading
import time

import numpy as np
import stage
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset


class Shards(IterableDataset):
    def __init__(self, batch, length):
        self.shape = (batch, length + 1)

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        rng = np.random.default_rng(info.id if info else 0)
        while True:
            yield torch.from_numpy(rng.integers(0, 4096, self.shape))


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Model(nn.Module):
    def __init__(self, d, n, h):
        super().__init__()
        self.embed = nn.Embedding(4096, d)
        self.blocks = nn.Sequential(*[Block(d, h) for _ in range(n)])
        self.norm = nn.LayerNorm(d)

    def forward(self, ids):
        return self.norm(self.blocks(self.embed(ids))) @ self.embed.weight.t()


class Trainer:
    def __init__(self, opts):
        s = opts.smoke
        batch, length = (2, 16) if s else (16, 1024)
        self.dev = opts.device
        with torch.device(self.dev):
            self.model = Model(32 if s else 1024, 2 if s else 8, 2 if s else 16)
        self.opt = torch.optim.AdamW(self.model.parameters(), 3e-4, fused=not s)
        loader = DataLoader(Shards(batch, length), batch_size=None, num_workers=1 if s else 2, pin_memory=not s,
                            worker_init_fn=stage.tie_to_parent)
        self.feed = iter(loader)
        self.losses = []

    def blocking_sync(self, loss):
        self.losses.append(loss.item())
        del self.losses[:-100]

    def step(self):
        ids = next(self.feed).to(self.dev, non_blocking=True)
        with torch.autocast(self.dev, dtype=torch.bfloat16):
            logits = self.model(ids[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        self.blocking_sync(loss)


def slow_checkpoint(trainer, folder):
    """A line of progress now and then."""
    while True:
        time.sleep(0.25)
        with open(os.path.join(folder, "progress.txt"), "w") as f:
            f.write("%d\n" % len(trainer.losses))


def main():
    opts = stage.options()
    torch.manual_seed(opts.seed)
    t = Trainer(opts)
    threading.Thread(target=slow_checkpoint, args=(t, stage.scratch_dir()), name="slow-checkpoint",
                     daemon=True).start()
    stage.conduct(opts, t.step, [])


if __name__ == "__main__":
    main()
