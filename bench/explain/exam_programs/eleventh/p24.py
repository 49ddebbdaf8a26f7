# SPDX-License-Identifier: Apache-2.0
"""Click prediction from raw log lines; a closure cleans them before the model."""
from concurrent.futures import ThreadPoolExecutor

import stage
import torch
from torch import nn


def make_cleaner(buckets):
    words = ("Phone", "tablet ", "TV", " radio", "Lamp", "desk", "chaiR", "book")
    lines = ["%s|%s|%d" % (words[i % 8], words[(i * 5 + 3) % 8], i * 37 % 1009) for i in range(5000)]
    state = {"extra": 0}

    def clean(start):
        out = []
        for k in range(16 + state["extra"]):
            left, right, price = lines[(start + k) % 5000].split("|")
            key = left.strip().lower() + "_" + right.strip().lower()
            h = 5381
            for ch in key:
                h = (h * 33 + ord(ch)) & 0xFFFFFFFF
            out.append((h + int(price)) % buckets)
        return out[:16]

    def extra(x):
        state["extra"] = int(x)

    return clean, extra


class Cross(nn.Module):
    def __init__(self, buckets, d, n):
        super().__init__()
        self.table = nn.Embedding(buckets, d)
        self.cross = nn.ModuleList(nn.Linear(d, d) for _ in range(n))
        self.out = nn.Linear(d, 1)

    def forward(self, ids, dense):
        x0 = x = self.table(ids).mean(0) + dense
        for c in self.cross:
            x = x0 * c(x) + x
            x = torch.nn.functional.normalize(x, dim=1)
        return self.out(x)


def main():
    opts = stage.options()
    s = opts.smoke
    buckets, d, n, rows = (500, 16, 2, 32) if s else (20000, 2048, 4, 8192)
    clean, extra = make_cleaner(buckets)
    model = Cross(buckets, d, n).to(opts.device)
    sgd = torch.optim.SGD(model.parameters(), 0.01)
    dense = torch.randn(rows, d, device=opts.device)
    pool = ThreadPoolExecutor(2, thread_name_prefix="gil-heavy-parser")
    turn = [0]
    losses = []

    def step():
        turn[0] += 1
        ids = torch.tensor(clean(turn[0] * 13), device=opts.device)
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids, dense), dense[:, :1].sigmoid())
        sgd.zero_grad(set_to_none=False)
        loss.backward()
        sgd.step()
        losses.append(loss.item())
        if len(losses) >= 50:
            pool.submit(max, list(losses))
            losses.clear()

    stage.conduct(opts, step, [
        stage.Factor("host_code", "make_cleaner.clean", "main.step", extra, 200.0),
    ], "light")


if __name__ == "__main__":
    main()
