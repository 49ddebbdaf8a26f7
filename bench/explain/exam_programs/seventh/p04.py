# SPDX-License-Identifier: Apache-2.0
"""Contextual bandit that learns online; every batch of decisions is journalled before it is served."""
import os, struct, tempfile
import numpy as np
import torch
import torch.nn as nn
import exam_kit
from exam_kit import Cause


class Journal:
    def __init__(self):
        self.dir = tempfile.mkdtemp(prefix="bandit-")
        self.path = os.path.join(self.dir, "decisions.bin")
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        self.at = 0

    def matmul_entry(self, key, body):
        rec = struct.pack("<QI", key, len(body)) + body
        os.pwrite(self.fd, rec, self.at)
        os.fsync(self.fd)
        self.at += len(rec)
        if self.at > 64 << 20:
            self.at = 0

    def close(self):
        os.close(self.fd)
        os.unlink(self.path)
        os.rmdir(self.dir)


class Bandit:
    def __init__(self, rng, smoke, dev):
        self.dev = dev
        self.b = 8 if smoke else rng.choice([6144, 8192])
        d = 32 if smoke else rng.choice([4096, 4608])
        self.net = nn.Sequential(nn.Linear(256, d), nn.ReLU(), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 40)).to(dev)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=1e-4)
        self.journal = Journal()
        self.per_step = 0.0
        self.credit = 0.0
        self.key = 0
        self.causes = [Cause("io", "Journal.matmul_entry", self.set_rate, 1.0, 0.02, 20000)]

    def set_rate(self, a, on):
        self.per_step = a if on else 0.0

    def step(self):
        x = torch.randn(self.b, 256, device=self.dev)
        q = self.net(x)
        arm = q.argmax(1)
        reward = torch.cos(x[:, 0] * 3 + arm)
        loss = (q.gather(1, arm[:, None]).squeeze(1) - reward).square().mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        served = arm.to(torch.uint8).cpu().numpy()
        self.credit += self.per_step
        while self.credit >= 1.0:
            self.credit -= 1.0
            self.key += 1
            self.journal.matmul_entry(self.key, served[:4096].tobytes())

    def close(self):
        self.journal.close()


if __name__ == "__main__":
    exam_kit.main(Bandit, "low", "each journal entry is written and fsynced by itself")
