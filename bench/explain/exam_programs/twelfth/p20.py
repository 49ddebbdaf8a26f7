# SPDX-License-Identifier: Apache-2.0
"""Masked pretraining of a small encoder, with an evaluation helper beside it."""
import stage
import os
import sys
import threading
import time

CELL, NOTE = None, None
if "--helper" in sys.argv:
    stage.tie_to_parent()
elif __name__ == "__main__":
    CELL, NOTE = stage.Cell(), os.path.join(stage.scratch_dir(), "up")
    stage.spawn("--helper", CELL.path, NOTE, *sys.argv[1:])

import torch
import torch.nn.functional as F
from torch import nn


class Reranker:
    """The helper scores candidates as long as there is work for it."""

    def __init__(self, dev, cell, note):
        size = 128 if dev == "cpu" else 2048
        self.dev, self.cell, self.note = dev, cell, note
        self.left = torch.randn(size, size, device=dev)
        self.right = torch.randn(size, size, device=dev)

    def serve(self):
        self.left @ self.right
        open(self.note, "w").close()
        owed = 0.0
        while True:
            work = self.cell.get()
            if work <= 0:
                owed = 0.0
                time.sleep(0.003)
                continue
            owed += work
            scores = self.left
            while owed >= 1:
                scores = (scores @ self.right) * 0.02
                owed -= 1
            scores[0, 0].item()
            time.sleep(0.006)


class Encoder(nn.Module):
    def __init__(self, vocab, dim, depth, heads):
        super().__init__()
        self.table = nn.Embedding(vocab, dim)
        block = lambda: nn.TransformerEncoderLayer(dim, heads, 4 * dim, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Pretrainer:
    def __init__(self, args):
        tiny, self.dev = args.smoke, args.device
        vocab, dim, depth, heads = (128, 32, 2, 4) if tiny else (8192, 1024, 8, 16)
        self.batch, self.length = (4, 32) if tiny else (16, 512)
        self.net = Encoder(vocab, dim, depth, heads).to(self.dev)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-4, fused=not tiny)
        self.vocab = vocab

    def step(self):
        ids = torch.randint(1, self.vocab, (self.batch, self.length), device=self.dev)
        mask = torch.rand(ids.shape, device=self.dev) < 0.15
        with torch.autocast(self.dev, torch.bfloat16, enabled=self.dev == "cuda"):
            out = self.net(ids.masked_fill(mask, 0))
            loss = F.cross_entropy(out.flatten(0, 1), ids.flatten())
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        return loss.item()


def main():
    args = stage.arguments()
    torch.manual_seed(args.seed)
    if "--helper" in sys.argv:
        torch.set_num_threads(1)
        at = sys.argv.index("--helper")
        return Reranker(args.device, stage.Cell(sys.argv[at + 1]), sys.argv[at + 2]).serve()
    load = stage.Dial(8, listen=CELL.set)
    trainer = Pretrainer(args)
    trainer.step()
    threading.Thread(target=time.sleep, args=(1e6,), name="eval-lock", daemon=True).start()
    began = time.time()
    while not os.path.exists(NOTE) and time.time() - began < 30:
        time.sleep(0.02)
    stage.conduct(args, trainer.step, [load], settle=4, rest=0.1)


if __name__ == "__main__":
    main()
