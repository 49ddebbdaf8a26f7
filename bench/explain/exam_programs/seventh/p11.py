# SPDX-License-Identifier: Apache-2.0
"""Fraud scoring server: account features from a shared registry, scores on the device, an audit thread beside it."""
import hashlib, queue, threading
import numpy as np
import torch
import torch.nn as nn
import exam_kit
from exam_kit import Cause


class Registry:
    """Account vectors; the auditor seals each batch of them."""

    def __init__(self, n, d, seed):
        g = np.random.default_rng(seed)
        self.vec = g.standard_normal((n, d), dtype=np.float32)
        self.blob = g.bytes(64 << 20)
        self.guard = threading.Lock()
        self.version = 0
        self.seal = b""
        self.sealed_bytes = 0
        self.inside = False

    def digest(self, n):
        return hashlib.sha256(memoryview(self.blob)[:n]).digest()

    def wait_device(self):
        """Auditor: seal the current state."""
        if self.inside:
            with self.guard:
                self.seal = self.digest(self.sealed_bytes)
                self.version += 1
        else:
            d = self.digest(self.sealed_bytes)
            with self.guard:
                self.seal = d
                self.version += 1

    def rows(self, ids):
        with self.guard:
            return self.vec[ids], self.version


class ScoreServer:
    def __init__(self, rng, smoke, dev):
        self.dev = dev
        n, d = (100, 16) if smoke else (200_000, 64)
        h = 32 if smoke else rng.choice([4096, 5120])
        self.b = 16 if smoke else 4096
        self.n = n
        self.reg = Registry(n, d, rng.randrange(1 << 30))
        self.net = nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 1)).to(dev)
        self.g = np.random.default_rng(5)
        self.work = queue.Queue()
        self.started = threading.Event()
        self.idle = threading.Event()
        self.idle.set()
        self.audit = threading.Thread(target=self.copy_results, daemon=True, name="prefetch-h2d")
        self.audit.start()
        self.causes = [Cause("lock", "Registry.rows", self.set_seal, 4 << 20, 4096, 64 << 20, integer=True, also="Registry.wait_device")]

    def set_seal(self, a, on):
        self.idle.wait()
        self.reg.sealed_bytes = int(a)
        self.reg.inside = on

    def copy_results(self):
        while True:
            if self.work.get() is None:
                return
            self.started.set()
            self.reg.wait_device()
            self.idle.set()

    @torch.no_grad()
    def step(self):
        if self.idle.is_set():
            self.idle.clear()
            self.started.clear()
            self.work.put(1)
            self.started.wait()
        ids = self.g.integers(0, self.n, self.b)
        x, _ = self.reg.rows(ids)
        s = torch.sigmoid(self.net(torch.from_numpy(x).to(self.dev)))
        return s.max().item()

    def close(self):
        self.work.put(None)


if __name__ == "__main__":
    exam_kit.main(ScoreServer, "high", "the auditor hashes while it holds the registry's lock; scoring waits for that lock")
