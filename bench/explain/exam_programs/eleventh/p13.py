# SPDX-License-Identifier: Apache-2.0
"""Fraud scoring with a durable ledger of decisions."""
import os
import struct
import threading
import time

import stage
import torch
from torch import nn


class Ledger:
    def __init__(self, folder):
        self.fd = os.open(os.path.join(folder, "ledger.bin"), os.O_CREAT | os.O_RDWR, 0o600)
        os.unlink(os.path.join(folder, "ledger.bin"))
        self.quota = stage.Quota()
        self.at = 0

    def append(self, scores):
        record = struct.pack("%df" % len(scores), *scores)
        for _ in range(self.quota.take()):
            os.pwrite(self.fd, record, self.at)
            self.at = (self.at + len(record)) % (1 << 22)
            os.fsync(self.fd)


class Wide(nn.Module):
    def __init__(self, cols, d):
        super().__init__()
        self.tables = nn.Embedding(cols * 100, d)
        self.base = torch.arange(cols) * 100
        self.mlp = nn.Sequential(nn.Linear(d * cols, 2 * d * cols), nn.ReLU(), nn.Linear(2 * d * cols, 512), nn.ReLU(),
                                 nn.Linear(512, 1))

    def forward(self, ids):
        return self.mlp(self.tables(ids + self.base).flatten(1)).squeeze(1)


def score_loop(opts, ledger):
    s = opts.smoke
    cols, d, rows = (4, 8, 32) if s else (32, 64, 32768)
    net = Wide(cols, d).to(opts.device).eval()
    net.base = net.base.to(opts.device)
    gen = torch.Generator().manual_seed(opts.seed)
    book = [torch.randint(0, 100, (rows, cols), generator=gen) for _ in range(4)]
    if not s:
        book = [b.pin_memory() for b in book]
    n = 0
    while True:
        with torch.inference_mode():
            ids = book[n % 4].to(opts.device, non_blocking=True)
            top = torch.sigmoid(net(ids)).topk(16).values
        ledger.append(top.tolist())
        n += 1
        yield n


def prefetcher():
    while True:
        time.sleep(0.004)


def main():
    opts = stage.options()
    ledger = Ledger(stage.scratch_dir())
    loop = score_loop(opts, ledger)
    threading.Thread(target=prefetcher, name="gpu-feeder", daemon=True).start()
    stage.conduct(opts, lambda: next(loop), [
        stage.Factor("io", "Ledger.append", "", ledger.quota.set, 0.3, 4000.0),
    ], "light")


if __name__ == "__main__":
    main()
