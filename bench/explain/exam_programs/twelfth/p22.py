# SPDX-License-Identifier: Apache-2.0
"""Contrastive learning against a long bank of earlier codes."""
import stage
import threading
import time

import torch
import torch.nn.functional as F
from torch import nn


class Bank:
    """Earlier codes lose weight with age."""

    def __init__(self, dev, rows, dim, reach):
        self.codes = F.normalize(torch.randn(rows, dim, device=dev), dim=1)
        self.reach, self.at = reach, 0
        self.block = max(1, rows // 2048)

    def age(self):
        left = int(self.reach() * self.block)
        while left > 0:
            some = self.codes[:left]
            some.mul_(0.9999).clamp_(-1, 1)
            left -= len(some)

    def push(self, fresh):
        n = len(fresh)
        if self.at + n > len(self.codes):
            self.at = 0
        self.codes[self.at:self.at + n].copy_(fresh)
        self.at += n

    def some(self, n):
        return self.codes[:n]


class Contrast:
    def __init__(self, args):
        self.tiny, self.dev = args.smoke, args.device
        dim, hidden, depth, self.batch, rows = (32, 64, 2, 64, 8192) if self.tiny else (1024, 4096, 3, 8192, 1 << 20)
        layers, cin = [], dim
        for _ in range(depth):
            layers += [nn.Linear(cin, hidden), nn.GELU()]
            cin = hidden
        self.net = nn.Sequential(*layers, nn.Linear(cin, dim)).to(self.dev)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=1e-3, momentum=0.9)
        self.reach = stage.Dial(300 if self.tiny else 3000)
        self.bank = Bank(self.dev, rows, dim, self.reach)
        self.dim = dim

    def step(self):
        left = torch.randn(self.batch, self.dim, device=self.dev)
        right = left + 0.1 * torch.randn_like(left)
        with torch.autocast(self.dev, torch.bfloat16, enabled=not self.tiny):
            a, b = F.normalize(self.net(left), dim=1), F.normalize(self.net(right), dim=1)
            near = (a * b).sum(1, keepdim=True)
            far = a @ self.bank.some(self.batch).T
            logits = torch.cat([near, far], 1).float() * 5
            loss = F.cross_entropy(logits, torch.zeros(self.batch, dtype=torch.long, device=self.dev))
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        self.bank.age()
        self.bank.push(b.detach().float())
        return loss.item()


def notes(items):
    """Appends the wall time; the list stays short."""
    while True:
        items.append(time.time())
        del items[:-10]
        time.sleep(0.02)


def main():
    args = stage.arguments()
    torch.manual_seed(args.seed)
    threading.Thread(target=notes, args=([],), name="log-writer", daemon=True).start()
    model = Contrast(args)
    stage.conduct(args, model.step, [model.reach])


if __name__ == "__main__":
    main()
