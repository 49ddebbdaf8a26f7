# SPDX-License-Identifier: Apache-2.0
"""Ranking server: user features from a shared in-memory store, a deep scorer on the device, top items back."""
import hashlib
import threading
import numpy as np
import torch
import torch.nn as nn
import exam_kit as kit

job = kit.Job("p11")
USERS = job.size([1024, 1536, 2048], 16)
ITEMS = job.size([4000, 6000], 50)
DIM = job.size([512, 768], 16)


class FeatureStore:
    """Rows of features, replaced in place by the importer; a checksum lets replicas compare."""

    def __init__(self):
        rng = np.random.default_rng(job.seed)
        self.rows = rng.standard_normal((20_000 if not job.smoke else 200, DIM), dtype=np.float32)
        self.blob = rng.integers(0, 255, 64 << 20 if not job.smoke else 1 << 20, dtype=np.uint8)
        self.mutex = threading.Lock()
        self.span = 1 << 16
        self.strict = False
        self.digest = b""
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.h2d_pump, name="pinned-h2d-pump", daemon=True)
        self.thread.start()

    def h2d_pump(self):
        while not self.stop.wait(0.002):
            if self.strict:
                with self.mutex:
                    self.digest = hashlib.sha256(self.blob[:self.span]).digest()
            else:
                digest = hashlib.sha256(self.blob[:self.span]).digest()
                with self.mutex:
                    self.digest = digest

    def read_socket(self, ids):
        with self.mutex:
            return self.rows[ids]

    def close(self):
        self.stop.set()
        self.thread.join(3)


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.ReLU(), nn.Linear(4 * DIM, 4 * DIM), nn.ReLU(),
                                  nn.Linear(4 * DIM, DIM))
        self.items = nn.Parameter(torch.randn(ITEMS, DIM))

    def forward(self, x):
        return (self.user(x) @ self.items.t()).topk(20).indices


class RankingServer:
    def __init__(self):
        self.store = FeatureStore()
        self.net = Scorer().to(job.dev).eval()
        self.rng = np.random.default_rng(job.seed + 1)
        self.answers = None

    @torch.no_grad()
    def serve(self):
        ids = self.rng.integers(0, len(self.store.rows), USERS)
        x = torch.from_numpy(self.store.read_socket(ids)).to(job.dev)
        self.answers = self.net(x).cpu().numpy()


def main():
    s = RankingServer()
    kit.on_close(s.store.close)

    def checks(n, on):
        s.store.span, s.store.strict = int(n), on
    c = kit.Cause("lock", "FeatureStore.read_socket", checks, job.share(0.43, 0.55), job.size(4 << 20, 1 << 18), 1 << 14,
                  job.size(64 << 20, 1 << 20), paired=True)
    kit.examine(job, [c], "the serving thread waits for the store's mutex, which the importer thread (FeatureStore.h2d_pump) "
                "holds while it hashes a large blob (off: it hashes first, then takes the mutex)", step=s.serve, window=0.6)


if __name__ == "__main__":
    main()
