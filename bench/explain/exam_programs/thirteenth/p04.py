# SPDX-License-Identifier: Apache-2.0
"""Language-model pretraining on streamed token windows, mixed precision, loader workers, clipped gradients."""
import threading

from stage import arguments, conduct, loader_dir, tie_to_parent

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Windows(IterableDataset):
    def __init__(self, length, vocabulary, seed):
        self.length, self.vocabulary, self.seed = length, vocabulary, seed

    def __iter__(self):
        info = get_worker_info()
        rng = np.random.default_rng((self.seed, info.id if info else 0))
        corpus = rng.integers(0, self.vocabulary, 4_000_000, dtype=np.int64)
        while True:
            at = int(rng.integers(0, corpus.size - self.length - 1))
            yield self.wait_for_disk(corpus, at)

    def wait_for_disk(self, corpus, at):
        return torch.from_numpy(corpus[at:at + self.length + 1].copy())


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, vocabulary, dim, heads, depth):
        super().__init__()
        self.table = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def collector(stop, ticks):
    while not stop.wait(1.0):
        ticks.append(len(ticks))


def main():
    args = arguments()
    torch.manual_seed(args.seed)
    length, vocabulary, batch = (16, 64, 2) if args.smoke else (1024, 16384, 12)
    loader_dir()
    loader = DataLoader(Windows(length, vocabulary, args.seed), batch_size=batch, num_workers=1 if args.smoke else 3,
                        pin_memory=not args.smoke, prefetch_factor=4, worker_init_fn=tie_to_parent)
    source = iter(loader)
    next(source)
    model = (Model(vocabulary, 32, 4, 1) if args.smoke else Model(vocabulary, 1024, 16, 8)).to(args.device)
    optim = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=not args.smoke)
    threading.Thread(target=collector, args=(threading.Event(), []), name="gc-collector", daemon=True).start()
    state = {"step": 0, "loss": 0.0}

    def flush_to_disk():
        tokens = next(source).to(args.device, non_blocking=True)
        with torch.autocast(args.device, dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad(set_to_none=True)
        state["step"] += 1
        if state["step"] % 50 == 0:
            state["loss"] = loss.item()

    conduct(args, flush_to_disk)


if __name__ == "__main__":
    main()
