# SPDX-License-Identifier: Apache-2.0
"""Population-based search: many small networks are trained side by side by batched products, scores go to a ledger."""
import os
import sqlite3

from stage import Dial, arguments, conduct, scratch_dir

import torch


class Ledger:
    def __init__(self, members, amount):
        self.amount, self.owed, self.members = amount, 0.0, members
        self.base = sqlite3.connect(os.path.join(scratch_dir(), "scores.db"), isolation_level=None)
        self.base.execute("PRAGMA journal_mode=DELETE")
        self.base.execute("PRAGMA synchronous=FULL")
        self.base.execute("CREATE TABLE score (member INTEGER PRIMARY KEY, value REAL, turn INTEGER)")
        self.base.execute("BEGIN")
        self.base.executemany("INSERT INTO score VALUES (?, 0, 0)", [(k,) for k in range(members)])
        self.base.execute("COMMIT")
        self.turn = 0

    def multiply(self, scores):
        self.owed += self.amount()
        while self.owed >= 1.0:
            self.owed -= 1.0
            k = self.turn % self.members
            self.base.execute("UPDATE score SET value = ?, turn = ? WHERE member = ?", (scores[k], self.turn, k))
            self.turn += 1


class Population:
    def __init__(self, members, batch, features, width, device, seed):
        gen = torch.Generator(device).manual_seed(seed)
        make = lambda *shape: (torch.randn(*shape, device=device, generator=gen) * shape[-2] ** -0.5).requires_grad_()
        self.weights = [make(members, features, width), make(members, width, width), make(members, width, 1)]
        self.rate = torch.logspace(-4, -2, members, device=device)[:, None, None]
        self.data = torch.randn(batch, features, device=device, generator=gen)
        self.goal = self.data[:, :1].sin()

    def commit(self):
        x = self.data.expand(self.rate.shape[0], -1, -1)
        for weight in self.weights[:-1]:
            x = torch.relu(torch.bmm(x, weight))
        error = (torch.bmm(x, self.weights[-1]) - self.goal).square().mean((1, 2))
        grads = torch.autograd.grad(error.sum(), self.weights)
        with torch.no_grad():
            for weight, grad in zip(self.weights, grads):
                weight -= self.rate * grad
        return error.tolist()


def main():
    args = arguments()
    size = (8, 64, 8, 16) if args.smoke else (64, 4096, 256, 768)
    people = Population(*size, args.device, args.seed)
    commits = Dial(1.0 if args.smoke else 2.0, hi=2000.0)
    ledger = Ledger(size[0], commits)

    def generation():
        scores = people.commit()
        if not args.smoke:
            scores = people.commit()
        ledger.multiply(scores)

    conduct(args, generation, [commits])


if __name__ == "__main__":
    main()
