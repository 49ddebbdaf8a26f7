# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python3
"""Contrastive image-text pretraining; a gradient diary is kept for the people who tune it."""
import json
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F

import bench_kit as bk


class Tower(nn.Module):
    def __init__(self, n_in, d, depth):
        super().__init__()
        self.inp = nn.Linear(n_in, d)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(d, max(1, d // 64), 4 * d, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth))

    def forward(self, x):
        x = self.inp(x)
        for ly in self.layers:
            x = ly(x)
        return F.normalize(x.mean(1).float(), dim=-1)


class Diary:
    """Gradient sizes of some tensors; the page on disk is rewritten from its start when it gets long."""

    def __init__(self, path):
        self.fd = os.open(path, os.O_CREAT | os.O_RDWR)
        self.path, self.at = path, 0
        self.named, self.watch = [], 0
        self.repeat, self.every, self.n = 0, 1, 0
        self.note = {}

    def measure(self):
        m = len(self.named)
        self.note = {}
        for i in range(self.watch):
            name, p = self.named[i % m]
            self.note[name] = float(p.grad.abs().max())

    def commit(self, loss):
        self.n += 1
        if self.repeat == 0 or self.n % self.every:
            return
        line = (json.dumps({"step": self.n, "loss": loss, "g": len(self.note)}) + " " * 4096)[:4096].encode()
        self.at += os.pwrite(self.fd, line * self.repeat, self.at)
        os.fsync(self.fd)
        if self.at > 32 << 20:
            self.at = 0

    def close(self):
        os.close(self.fd)
        os.unlink(self.path)


class Pretrainer:
    def __init__(self, o):
        d, depth, b, n = (32, 1, 4, 8) if o.smoke else (768, 4, o.rng.choice([96, 112, 128]), 64)
        self.o, self.dt = o, (torch.bfloat16 if o.gpu else torch.float32)
        self.img, self.txt = Tower(48, d, depth), Tower(32, d, depth)
        self.net = nn.ModuleList([self.img, self.txt]).to(o.device, self.dt)
        self.opt = torch.optim.AdamW(self.net.parameters(), 1e-5, fused=o.gpu)
        self.pix = [torch.randn(b, n, 48, device=o.device, dtype=self.dt) for _ in range(3)]
        self.tok = [torch.randn(b, n, 32, device=o.device, dtype=self.dt) for _ in range(3)]
        self.label = torch.arange(b, device=o.device)
        fd, path = tempfile.mkstemp(prefix="diary_")
        os.close(fd)
        self.diary = Diary(path)
        self.diary.named = [(k, p) for k, p in self.net.named_parameters()]
        self.i = 0

    def lockstep(self):
        k = self.i % 3
        self.i += 1
        sim = 20 * self.img(self.pix[k]) @ self.txt(self.tok[k]).t()
        loss = F.cross_entropy(sim, self.label) + F.cross_entropy(sim.t(), self.label)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.diary.measure()
        self.opt.step()
        self.diary.commit(loss.item())


def main():
    o = bk.options()
    share = o.rng.uniform(0.15, 0.20)
    job = Pretrainer(o)
    d, step = job.diary, job.lockstep
    bk.mean_step(step, 0.1 if o.smoke else 1.0, o.device)
    base = bk.mean_step(step, o.probe * 1.5, o.device)
    goal = base / (1 - share)
    mid = (base + goal) / 2

    def with_watch(k):
        d.watch = k
        return bk.mean_step(step, o.probe, o.device)

    def with_commit(a):
        d.repeat, d.every = max(1, int(a)), (1 if a >= 1 else min(5, round(1 / a)))
        return bk.mean_step(step, o.probe * 1.5, o.device)

    watch = bk.tune(with_watch, base, 1 - base / mid, 20, 20 * len(d.named), tol=0.01)
    at = with_watch(watch)
    want = at + (goal - base) / 2
    a = bk.tune(with_commit, at, 1 - at / want, 1.0, 20_000.0, whole=False, tol=0.01)

    def enable():
        d.watch = watch
        with_commit(a)
        d.last = (d.repeat, d.every)

    def disable():
        d.watch = d.repeat = 0

    on, off = bk.two_phases(step, o, enable, disable)
    d.close()
    bk.truth(on, off, ["synchronization", "io"], ["Diary.measure", "Diary.commit"],
             f"{watch} gradient maxima read back one by one (about {(at - base) / max(on - off, 1e-6):.2f} of the "
             f"loss); {d.last[0]} x 4 KB written and fsynced every {d.last[1]} step(s) (rest)")


if __name__ == "__main__":
    main()
