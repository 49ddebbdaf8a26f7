# SPDX-License-Identifier: Apache-2.0
"""Reward-model training while a second thread cleans the text of the next shard (pure Python)."""
import re
import threading
import time
import torch
import torch.nn as nn
from rig import Kit, DEV

WORDS = "the quick brown fox jumps over lazy dogs while seven wizards quietly vex bold knights".split()


class Scorer(nn.Module):
    def __init__(self, d, depth):
        super().__init__()
        self.ff = nn.ModuleList([nn.Linear(d, d) for _ in range(depth)])
        self.norm = nn.ModuleList([nn.LayerNorm(d) for _ in range(depth)])
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        for f, n in zip(self.ff, self.norm):
            x = x + torch.nn.functional.silu(f(n(x)))
        return self.out(x).squeeze(1)


class Shard:
    """text of the next shard, cleaned ahead of time"""
    def __init__(self, rng):
        self.lines = [" ".join(rng.choice(WORDS) for _ in range(40)) for _ in range(200)]
        self.vocab = {}
        self.cleaned = 0

    def clean(self, line):
        out = []
        prev = ""
        for ch in line:
            if ch.isalpha() or prev != ch:
                out.append(ch.lower())
            prev = ch
        for i in range(len(out) - 1):
            pair = out[i] + out[i + 1]
            self.vocab[pair] = self.vocab.get(pair, 0) + 1
        self.cleaned += 1
        return "".join(out)

    def clean_for(self, seconds):
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.clean(self.lines[self.cleaned % len(self.lines)])


def io_wait(lines):
    """joins log lines; nothing waits here"""
    return re.sub(r"\s+", " ", " ".join(lines))


def main():
    kit = Kit(__file__)
    rng = kit.rng
    d = kit.n(rng.choice([1024, 1280]), 32)
    batch = kit.n(rng.choice([1024, 2048]), 8)
    net = Scorer(d, kit.n(rng.choice([8, 10, 12]), 2)).to(DEV)
    opt = torch.optim.Adam(net.parameters(), 1e-4, foreach=True)
    a = torch.randn(batch, d, device=DEV)
    b = torch.randn(batch, d, device=DEV)
    share = kit.share(0.66, 0.92, 1.1)
    period = rng.uniform(0.09, 0.16)
    shard = Shard(rng)
    enabled = threading.Event()

    def cleaner():
        while True:
            enabled.wait()
            shard.clean_for(period * share)
            time.sleep(period * (1 - share))

    threading.Thread(target=cleaner, name="pin_memory", daemon=True).start()
    kit.ablate.append(enabled.clear)
    kit.cause("gil", kit.place(Shard.clean, "for ch in line"),
              "text cleaning in a thread of the training process keeps the interpreter", "thread pin_memory")
    log = []
    margin = 0.0
    for i in kit.steps(warm=25):
        if kit.on and not enabled.is_set():
            enabled.set()
        diff = net(a) - net(b)
        loss = nn.functional.softplus(-diff).mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        margin = 0.9 * margin + 0.1 * loss.item()
        log.append("%d %.4f" % (i, margin))
        if len(log) > 50:
            io_wait(log)
            log.clear()


if __name__ == "__main__":
    main()
