# SPDX-License-Identifier: Apache-2.0
"""Document embedding: token states pooled on the device, vectors added to an index that a snapshot thread packs."""
import queue, threading, zlib
import numpy as np
import torch
import exam_kit
from exam_kit import Cause


class Index:
    def __init__(self, d, seed):
        g = np.random.default_rng(seed)
        self.rows = g.standard_normal((1 << 16, d), dtype=np.float32)
        self.flat = memoryview(self.rows).cast("B")
        self.gate = threading.RLock()
        self.at = 0
        self.pack = 0
        self.exclusive = False
        self.image = b""

    def upload_rows(self):
        """Snapshot of the newest part."""
        if self.exclusive:
            with self.gate:
                self.image = zlib.compress(self.flat[:self.pack], 1)
        else:
            image = zlib.compress(self.flat[:self.pack], 1)
            with self.gate:
                self.image = image

    def encode(self, v):
        with self.gate:
            n = len(v)
            if self.at + n > len(self.rows):
                self.at = 0
            self.rows[self.at:self.at + n] = v
            self.at += n


class Embedder:
    def __init__(self, rng, smoke, dev):
        self.dev = dev
        self.docs, self.len, self.d = (4, 8, 32) if smoke else (256, 128, rng.choice([1024, 1280]))
        d = self.d
        self.ws = [torch.randn(d, d, device=dev) / d ** 0.5 for _ in range(2 if smoke else 6)]
        self.host = torch.zeros(self.docs * self.len, d)
        self.shown = 0
        self.index = Index(d, rng.randrange(1 << 30))
        self.work = queue.Queue()
        self.started, self.idle = threading.Event(), threading.Event()
        self.idle.set()
        threading.Thread(target=self.training_loop, daemon=True, name="backward").start()
        m = self.docs * self.len
        self.causes = [Cause("copies", "Embedder.lock_rows", self.set_shown, m // 8, 4, m, integer=True),
                       Cause("lock", "Index.encode", self.set_pack, 2000 if smoke else 100_000, 500, self.index.rows.nbytes, integer=True,
                             also="Index.upload_rows")]

    def set_shown(self, a, on):
        self.shown = int(a) if on else 0

    def set_pack(self, a, on):
        self.idle.wait()
        self.index.pack, self.index.exclusive = int(a), on

    def training_loop(self):
        while self.work.get() is not None:
            self.started.set()
            self.index.upload_rows()
            self.idle.set()

    def lock_rows(self, h):
        """Token states for the debugging view."""
        n = self.shown
        if n:
            self.host[:n].copy_(h[:n])
        return float(self.host[0, 0])

    @torch.no_grad()
    def step(self):
        h = torch.randn(self.docs * self.len, self.d, device=self.dev)
        for w in self.ws:
            h = torch.tanh(h @ w)
        pooled = h.view(self.docs, self.len, self.d).mean(1)
        v = pooled.cpu().numpy()
        self.lock_rows(h)
        if self.idle.is_set():
            self.idle.clear()
            self.started.clear()
            self.work.put(1)
            self.started.wait()
        self.index.encode(v)

    def close(self):
        self.work.put(None)


if __name__ == "__main__":
    exam_kit.main(Embedder, "pair", "all token states are brought to the host though only pooled ones are used; the snapshot is compressed under the index lock")
