# SPDX-License-Identifier: Apache-2.0
"""Anomaly scores for a stream of sensor events; alarms are put on record before the next batch."""
import os
import shutil
import struct
import tempfile
import threading

import torch
import torch.nn as nn

import exam_kit as kit


class Encoder(nn.Module):
    def __init__(self, channels, dim, depth):
        super().__init__()
        self.inp = nn.Linear(channels, dim)
        self.enc = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))
        self.code = nn.Linear(dim, dim // 8)
        self.dec = nn.Linear(dim // 8, channels)

    def forward(self, x):
        h = torch.relu(self.inp(x))
        for e in self.enc:
            h = h + torch.relu(e(h))
        return self.dec(self.code(h))


class Register:
    """Alarms, kept in segments of a few megabytes."""

    def __init__(self, folder):
        self.folder = folder
        self.fd = os.open(os.path.join(folder, "seg0"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        self.at, self.rate, self.due = 0, 0.0, 0.0
        self.guard = threading.Lock()

    def enter(self, alarms):
        self.due += self.rate
        with self.guard:
            while self.due >= 1:
                self.due -= 1
                body = b"".join(struct.pack("d", a) for a in alarms).ljust(2048, b"\0")
                os.pwrite(self.fd, body, self.at)
                os.fsync(self.fd)
                self.at = (self.at + 2048) % (4 << 20)

    def close(self):
        os.close(self.fd)


class GraphRebuildMonitor(kit.Job):
    detail = "alarm records are written and fsynced one at a time in the loop"

    def __init__(self, ctx):
        ch = ctx.pick(16, 512)
        self.net = Encoder(ch, ctx.pick(32, 1536, 2048), ctx.pick(1, 4, 6)).to(ctx.dev, ctx.dtype).eval()
        self.x = torch.randn(4, ctx.pick(64, 49152, 65536), ch, device=ctx.dev, dtype=ctx.dtype)
        self.dir = tempfile.mkdtemp()
        self.register = Register(self.dir)
        self.n = 0
        self.levers = [kit.Lever("io", "Register.enter", self.set_rate, ctx.share(0.22, 0.32), start=1.5,
                                 hi=100000.0, integer=False)]

    def set_rate(self, a):
        self.register.rate = a

    @torch.no_grad()
    def step(self):
        x = self.x[self.n % 4]
        self.n += 1
        err = (self.net(x) - x).float().square().mean(1)
        alarms = err.topk(12).values.tolist()
        self.register.enter(alarms)

    def close(self):
        self.register.close()
        shutil.rmtree(self.dir, ignore_errors=True)


if __name__ == "__main__":
    kit.main(GraphRebuildMonitor)
