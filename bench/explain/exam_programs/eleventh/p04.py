# SPDX-License-Identifier: Apache-2.0
"""Board game agent: a batched tree search with a value network, trees rebuilt every move."""
import gc
import random

import stage
import torch
from torch import nn


class Node:
    __slots__ = ("up", "kids", "n", "v", "__weakref__")

    def __init__(self, up):
        self.up, self.kids, self.n, self.v = up, [], 0, 0.0


class Search:
    def __init__(self, width, keep):
        self.width = width
        self.rng = random.Random(3)
        self.archive = [self.grow(40) for _ in range(keep)]
        self.quota = stage.Quota()

    def grow(self, size):
        root = Node(None)
        open_nodes = [root]
        for _ in range(size):
            parent = open_nodes[self.rng.randrange(len(open_nodes))]
            kid = Node(parent)
            parent.kids.append(kid)
            open_nodes.append(kid)
        return root

    def credit(self, root, value):
        node = root
        while node.kids:
            node.n += 1
            node.v += value
            node = node.kids[node.n % len(node.kids)]

    def retire(self, trees):
        """Old trees hold parents and children in cycles."""
        slot = self.rng.randrange(len(self.archive))
        self.archive[slot] = trees[0]
        trees.clear()
        for _ in range(self.quota.take()):
            gc.collect()


class Value(nn.Module):
    def __init__(self, w, depth):
        super().__init__()
        self.stem = nn.Conv2d(17, w, 3, padding=1)
        self.tower = nn.ModuleList(nn.Conv2d(w, w, 3, padding=1) for _ in range(depth))
        self.head = nn.Linear(w, 1)

    def forward(self, x):
        x = self.stem(x).relu()
        for c in self.tower:
            x = x + c(x).relu()
        return self.head(x.mean((2, 3))).tanh()


def play(opts):
    s = opts.smoke
    torch.backends.cudnn.benchmark = True
    dtype = torch.float32 if s else torch.bfloat16
    net = Value(8 if s else 256, 2 if s else 16).to(opts.device, dtype).eval()
    boards = torch.randn(4 if s else 512, 17, 19, 19, device=opts.device, dtype=dtype)
    search = Search(8, 20 if s else 300)
    while True:
        trees = [search.grow(30) for _ in range(search.width)]
        with torch.inference_mode():
            values = net(boards).float().flatten()[:search.width].tolist()
        for t, v in zip(trees, values):
            search.credit(t, v)
        search.retire(trees)
        yield search


def main():
    opts = stage.options()
    gc.set_threshold(100000, 50, 100)
    gc.freeze()
    game = play(opts)
    search = next(game)
    stage.conduct(opts, lambda: next(game), [
        stage.Factor("gc", "Search.retire", "", search.quota.set, 0.3),
    ], "light")


if __name__ == "__main__":
    main()
