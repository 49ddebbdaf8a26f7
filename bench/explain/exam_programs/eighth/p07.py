# SPDX-License-Identifier: Apache-2.0
"""Online bidding: a model learns from each batch, budgets are booked in a ledger, an auditor fingerprints it."""
import threading
import zlib

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import exam_kit as kit


class Ledger:
    def __init__(self, accounts):
        self.guard = threading.Lock()
        self.spent = np.zeros(accounts)

    def book(self, who, amount):
        with self.guard:
            np.add.at(self.spent, who, amount)


class Auditor:
    """Fingerprints the history blocks every few milliseconds."""

    def __init__(self, ledger, blocks, size, rng):
        self.ledger = ledger
        self.blocks = [rng.bytes(size) for _ in range(blocks)]
        self.depth = 0
        self.inside = False
        self.stop = threading.Event()
        self.mark = 0

    def fingerprint(self):
        mark = 0
        for i in range(self.depth):
            mark = zlib.adler32(self.blocks[i % len(self.blocks)], mark)
        self.mark = mark

    def run(self):
        while not self.stop.wait(0.004):
            if self.inside:
                with self.ledger.guard:
                    self.fingerprint()
            else:
                self.fingerprint()


class Bidder(kit.Job):
    detail = "the audit thread holds the ledger's lock while it checksums (without the GIL); booking waits for it"

    def __init__(self, ctx):
        self.batch, self.dim = ctx.pick(64, 8192, 12288), ctx.pick(32, 1024, 1536)
        h = ctx.pick(32, 2048, 2560)
        self.net = nn.Sequential(nn.Linear(self.dim, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(),
                                 nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 1)).to(ctx.dev)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=1e-4)
        self.x = torch.randn(self.batch, self.dim, device=ctx.dev)
        self.y = (torch.rand(self.batch, device=ctx.dev) < 0.1).float()
        self.who = ctx.np_rng.integers(0, 5000, (8, 64))
        self.ledger = Ledger(5000)
        self.auditor = Auditor(self.ledger, 16, ctx.pick(20000, 262144), ctx.np_rng)
        threading.Thread(target=self.auditor.run, name="dataloader-0", daemon=True).start()
        self.levers = [kit.Lever("lock", "Ledger.book", self.set_depth, ctx.share(0.13, 0.18),
                                 start=ctx.pick(5, 60), alt="Auditor.run / Auditor.fingerprint (holder)")]

    def set_depth(self, a):
        self.auditor.inside = bool(a)
        self.auditor.depth = a or self.auditor.depth

    def step(self):
        for part in range(2):
            score = self.net(self.x).squeeze(1)
            loss = F.binary_cross_entropy_with_logits(score, self.y)
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            self.opt.step()
            bids = torch.sigmoid(score[:64].detach()).cpu().numpy()
            for k in range(4):
                self.ledger.book(self.who[2 * k + part], bids)

    def close(self):
        self.auditor.stop.set()


if __name__ == "__main__":
    kit.main(Bidder)
