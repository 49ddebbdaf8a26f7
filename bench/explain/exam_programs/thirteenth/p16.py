# SPDX-License-Identifier: Apache-2.0
"""Click prediction learned online: crossed features, many small tables, an agent beside it that keeps campaign budgets."""
import queue
import threading

from stage import Dial, arguments, conduct

import torch
import torch.nn as nn


class Uploader(threading.Thread):
    def __init__(self, amount):
        super().__init__(name="disk-writer", daemon=True)
        self.amount, self.inbox = amount, queue.SimpleQueue()
        self.budget = {k: 1000.0 for k in range(997)}

    def run(self):
        while True:
            bids = self.inbox.get()
            self.write_block(bids)

    def write_block(self, bids):
        budget = self.budget
        for k in range(self.amount()):
            left = budget[k % 997] - bids * 0.001
            budget[k % 997] = left if left > 0 else 1000.0


class Clicks(nn.Module):
    def __init__(self, tables, rows, dim, width):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, dim) for _ in range(tables))
        self.cross = nn.ParameterList(nn.Parameter(torch.randn(tables * dim) * 0.01) for _ in range(6))
        self.deep = nn.Sequential(nn.Linear(tables * dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                                  nn.Linear(width, 1))

    def forward(self, ids):
        x = first = torch.cat([table(ids[:, k]) for k, table in enumerate(self.tables)], 1)
        for weight in self.cross:
            x = first * (x @ weight)[:, None] + x
        return self.deep(x).flatten()


def main():
    args = arguments()
    torch.manual_seed(args.seed)
    batch, tables, rows, dim, width = (64, 4, 100, 4, 16) if args.smoke else (16384, 26, 4000, 32, 1536)
    dial = Dial(10_000 if args.smoke else 60_000, hi=20_000_000, whole=True)
    net = Clicks(tables, rows, dim, width).to(args.device)
    optim = torch.optim.Adagrad(net.parameters(), lr=1e-2, foreach=True)
    agent = Uploader(dial)
    agent.start()
    ids = torch.randint(rows, (8, batch, tables), device=args.device)
    clicked = torch.rand(8, batch, device=args.device).round_()
    lossf = nn.BCEWithLogitsLoss()
    seen = []

    def step():
        k = len(seen) % 8
        agent.inbox.put(1 + k)
        loss = lossf(net(ids[k]), clicked[k])
        optim.zero_grad(set_to_none=True)
        loss.backward()
        optim.step()
        seen.append(loss.item())
        if len(seen) > 4096:
            del seen[:2048]

    conduct(args, step, [dial], settle=3)


if __name__ == "__main__":
    main()
