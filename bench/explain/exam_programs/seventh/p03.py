# SPDX-License-Identifier: Apache-2.0
"""Program synthesis: a beam of expression trees is grown, a value net on the device ranks the children."""
import gc
import random
import torch
import torch.nn as nn
import exam_kit
from exam_kit import Cause


class Expr:
    __slots__ = ("op", "parent", "kids", "score")

    def __init__(self, op, parent):
        self.op, self.parent, self.kids, self.score = op, parent, [], 0.0


class Forest:
    """Expressions already seen; kept, for the search must not visit them twice."""

    def __init__(self, r):
        self.r = r
        self.roots = []
        self.size = 0

    def resize(self, n):
        while self.size > n:
            self.drop(self.roots.pop())
            self.size -= 50
        while self.size < n:
            root = Expr(0, None)
            tips = [root]
            for _ in range(49):
                p = self.r.choice(tips)
                k = Expr(self.r.randrange(9), p)
                p.kids.append(k)
                tips.append(k)
            self.roots.append(root)
            self.size += 50

    def drop(self, root):
        todo = [root]
        while todo:
            e = todo.pop()
            e.parent = None
            todo.extend(e.kids)
            e.kids = []


class Search:
    def __init__(self, rng, smoke, dev):
        gc.collect()
        gc.freeze()
        self.dev = dev
        self.r = random.Random(rng.randrange(1 << 30))
        self.beam = 16 if smoke else 1024
        d = 32 if smoke else rng.choice([4096, 5120])
        self.feat = 64
        self.net = nn.Sequential(nn.Linear(self.feat, d), nn.ReLU(), *[m for _ in range(4) for m in (nn.Linear(d, d), nn.ReLU())],
                                 nn.Linear(d, 1)).to(dev)
        self.table = torch.randn(16, self.feat, device=dev)
        self.forest = Forest(self.r)
        self.max_nodes = 2000 if smoke else 3_000_000
        self.tidy = False
        self.causes = [Cause("gc", "Search.compact_device_memory", self.set_tidy, 1000 if smoke else 60000, 500, self.max_nodes, integer=True)]

    def set_tidy(self, a, on):
        self.tidy = on
        if on:
            self.forest.resize(int(a))

    def compact_device_memory(self):
        gc.collect()

    @torch.no_grad()
    def step(self):
        roots = [Expr(self.r.randrange(9), None) for _ in range(self.beam // 16)]
        ops = []
        for e in roots:
            for j in range(16):
                k = Expr(j, e)
                e.kids.append(k)
                ops.append(j)
        x = self.table[torch.tensor(ops).to(self.dev)].repeat(4, 1)
        v = self.net(x + 0.01 * torch.randn_like(x)).view(4, -1, 16).mean(0)
        pick = v.argmax(1).tolist()
        for e, p in zip(roots, pick):
            e.score = float(p)
            e.kids = []
        if self.tidy:
            self.compact_device_memory()


if __name__ == "__main__":
    exam_kit.main(Search, "mid", "a full collection over all live expressions after every expansion")
