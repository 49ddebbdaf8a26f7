# SPDX-License-Identifier: Apache-2.0
"""Curriculum training of a sequence tagger; the curriculum looks at the layers' gradient norms."""
import gc
import torch
import torch.nn as nn
import torch.nn.functional as F
import exam_kit as kit

job = kit.Job("p05")
BATCH = job.size([128, 192, 256], 4)
DIM = job.size([256, 320, 384], 16)
LAYERS = job.size([14, 18], 3)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(64, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(LAYERS))
        self.ups = nn.ModuleList(nn.Linear(DIM, 2 * DIM) for _ in range(LAYERS))
        self.downs = nn.ModuleList(nn.Linear(2 * DIM, DIM) for _ in range(LAYERS))
        self.out = nn.Linear(DIM, 30)

    def forward(self, x):
        x = self.inp(x)
        for n, u, d in zip(self.norms, self.ups, self.downs):
            x = x + d(F.gelu(u(n(x))))
        return self.out(x)


class Entry:
    __slots__ = ("parent", "kids", "level", "score", "__weakref__")

    def __init__(self, parent, level):
        self.parent, self.kids, self.level, self.score = parent, [], level, {}
        if parent:
            parent.kids.append(self)


class LessonBook:
    """Tree of lessons; pruned lessons refer to each other, hence the tidy-up."""

    def __init__(self):
        self.root = Entry(None, 0)
        self.flat = [self.root]
        self.tidy = False
        gc.collect()
        gc.freeze()

    def grow(self, n):
        while len(self.flat) < n:
            e = Entry(self.flat[len(self.flat) // 4], len(self.flat))
            e.score["seen"] = [e.level, 0]
            self.flat.append(e)
        while len(self.flat) > n:
            e = self.flat.pop()
            e.parent.kids.remove(e)

    def cudnn_lookup(self, step):
        e = Entry(None, step)
        e.kids.append(e)
        if self.tidy:
            gc.collect()


class Coach:
    def __init__(self):
        self.net = Mixer().to(job.dev)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-3, foreach=True)
        self.x = torch.randn(8, BATCH, 64, device=job.dev)
        self.y = torch.randint(0, 30, (8, BATCH), device=job.dev)
        self.book = LessonBook()
        self.watch = 0
        self.levels = [0.0] * 4096
        self.n = 0

    def read_config(self, norms):
        for i in range(self.watch):
            self.levels[i] = 0.9 * self.levels[i] + 0.1 * norms[i % len(norms)].item()

    def lesson(self):
        i = self.n % 8
        self.n += 1
        loss = F.cross_entropy(self.net(self.x[i]), self.y[i])
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        norms = torch._foreach_norm([p.grad for p in self.net.parameters()])
        self.read_config(norms)
        self.opt.step()
        self.book.cudnn_lookup(self.n)


def main():
    coach = Coach()
    kit.on_close(gc.unfreeze)

    def watch(n, on):
        coach.watch = int(n) if on else 0

    def tidy(n, on):
        coach.book.tidy = on
        if on:
            coach.book.grow(int(n))
    cs = [kit.Cause("synchronization", "Coach.read_config", watch, job.share(0.17, 0.22), job.size(40, 3), 1, 4000),
          kit.Cause("gc", "LessonBook.cudnn_lookup", tidy, job.share(0.17, 0.22), job.size(8000, 300), 100, 400_000)]
    kit.examine(job, cs, "gradient norms are read one by one with .item(); a full garbage collection in every step over the "
                "tree of lessons", step=coach.lesson)


if __name__ == "__main__":
    main()
