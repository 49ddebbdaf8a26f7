# SPDX-License-Identifier: Apache-2.0
"""Pretraining of a small language model from packed token files."""
import stage
import math
import threading
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Packed(IterableDataset):
    def __init__(self, vocab, batch, length, seed):
        self.vocab, self.batch, self.length, self.seed = vocab, batch, length, seed

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        rng = np.random.default_rng(self.seed * 100 + info.id)
        stream = rng.integers(0, self.vocab, 4_000_000, dtype=np.int64)
        need = self.batch * (self.length + 1)
        while True:
            at = int(rng.integers(0, len(stream) - need))
            yield torch.from_numpy(stream[at:at + need].reshape(self.batch, -1).copy())


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, vocab, dim, depth, heads):
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(depth))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def wait_for_lock(flag):
    """Would renew the lease of the run's directory."""
    while True:
        flag.acquire()
        time.sleep(0.25)


def cosine(i, peak=3e-4, warm=50, total=20_000):
    return peak * min(1.0, (i + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, i / total)))


def main():
    args = stage.arguments()
    torch.manual_seed(args.seed)
    tiny, dev = args.smoke, args.device
    vocab, dim, depth, heads = (256, 64, 2, 4) if tiny else (16384, 1024, 8, 16)
    batch, length = (4, 64) if tiny else (8, 1024)
    loader = DataLoader(Packed(vocab, batch, length, args.seed), batch_size=None, num_workers=2 if tiny else 3,
                        pin_memory=not tiny, prefetch_factor=4, worker_init_fn=stage.tie_to_parent,
                        multiprocessing_context="fork")
    feed = iter(loader)
    permit = threading.Semaphore(0)
    threading.Thread(target=wait_for_lock, args=(permit,), name="blocking-io", daemon=True).start()
    model = Model(vocab, dim, depth, heads).to(dev)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=not tiny)
    seen = {"steps": 0, "loss": 0.0}

    def step():
        ids = next(feed).to(dev, non_blocking=True)
        with torch.autocast(dev, torch.bfloat16, enabled=not tiny):
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        for group in opt.param_groups:
            group["lr"] = cosine(seen["steps"])
        opt.step()
        seen["loss"] += loss.item()
        seen["steps"] += 1
        if seen["steps"] % 16 == 0:
            permit.release()

    stage.conduct(args, step)


if __name__ == "__main__":
    main()
