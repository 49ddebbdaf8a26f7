# SPDX-License-Identifier: Apache-2.0
"""Self-play of a board game: tree search in Python, a policy network, a fixed opponent."""
import gc

import torch
import torch.nn as nn

import exam_kit as kit


class Position:
    __slots__ = ("parent", "moves", "value", "__weakref__")

    def __init__(self, parent, value):
        self.parent, self.moves, self.value = parent, [], value
        if parent is not None:
            parent.moves.append(self)


class Book:
    """Games kept for the training set."""

    def __init__(self):
        self.games = []

    def grow(self, positions):
        self.games = []
        left = positions
        while left > 0:
            root = Position(None, 0.0)
            node = root
            for i in range(min(200, left)):
                node = Position(node if i % 3 else root, i * 0.01)
            self.games.append(root)
            left -= 200

    def finish(self, node):
        while node is not None:
            node, up = node.parent, node
            up.moves.clear()
        if self.games:
            gc.collect()


class Net(nn.Module):
    def __init__(self, ch, depth):
        super().__init__()
        self.stem = nn.Conv2d(4, ch, 3, padding=1)
        self.body = nn.ModuleList(nn.Conv2d(ch, ch, 3, padding=1) for _ in range(depth))
        self.head = nn.Linear(ch, 82)

    def forward(self, x):
        h = torch.relu(self.stem(x))
        for c in self.body:
            h = h + torch.relu(c(h))
        return self.head(h.mean((2, 3)))


class Opponent:
    """Frozen; plays from a table of replies."""

    def __init__(self, dim, dev, dtype):
        self.w = [torch.randn(dim, dim, device=dev, dtype=dtype) / dim ** 0.5 for _ in range(2)]
        self.keys = torch.randn(dim, dim, device=dev, dtype=dtype)
        self.rounds = 0
        self.reply = self.keys[0].clone()

    def prepare(self):
        for r in range(self.rounds):
            h = torch.relu(self.keys[:1024] @ self.w[r % 2])
            self.reply = h[0]


class SelfPlay(kit.Job):
    detail = "full collection after each game over the kept games; the frozen opponent's table is recomputed each step"

    def __init__(self, ctx):
        self.net = Net(ctx.pick(8, 192, 256), ctx.pick(1, 8, 12)).to(ctx.dev, ctx.dtype).eval()
        self.boards = torch.randn(ctx.pick(4, 1024, 1536), 4, 9, 9, device=ctx.dev, dtype=ctx.dtype)
        self.opponent = Opponent(ctx.pick(64, 2048, 4096), ctx.dev, ctx.dtype)
        self.book = Book()
        gc.collect()
        gc.freeze()
        self.levers = [
            kit.Lever("gc", "Book.finish", self.set_positions, ctx.share(0.17, 0.23), start=ctx.pick(500, 15000),
                      hi=3000000),
            kit.Lever("device_compute", "Opponent.prepare", self.set_rounds, ctx.share(0.17, 0.23),
                      start=ctx.pick(2, 20))]

    def set_positions(self, a):
        self.book.grow(a)

    def set_rounds(self, a):
        self.opponent.rounds = a

    @torch.no_grad()
    def step(self):
        node = Position(None, 0.0)
        for v in range(3):
            self.opponent.prepare() if v == 0 else None
            best = self.net(self.boards).float().softmax(1).amax(0)[:8].tolist()
            for p in best:
                node = Position(node, p)
        self.book.finish(node)


if __name__ == "__main__":
    kit.main(SelfPlay)
