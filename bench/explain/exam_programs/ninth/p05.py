# SPDX-License-Identifier: Apache-2.0
"""Clustering of customer profiles: Lloyd's iterations with soft assignments, results shown by a panel thread."""
import kit
import gc
import threading
import time
import torch


class Panel:
    """Shows inertia; asks for the lock now and then."""

    def __init__(self):
        self.lock = threading.Lock()
        self.rows = []
        self.thread = threading.Thread(target=self.wait_for_lock, name="slow-callback", daemon=True)
        self.thread.start()

    def wait_for_lock(self):
        while True:
            time.sleep(0.02)
            with self.lock:
                del self.rows[:-100]

    def put(self, value):
        with self.lock:
            self.rows.append(value)


def lloyd(x, c, heat, rounds):
    for _ in range(rounds):
        logit = (x @ c.T) * heat
        w = torch.softmax(logit.float(), dim=1).to(x.dtype)
        c = (w.T @ x) / (w.sum(0, dtype=torch.float32)[:, None] + 1.0).to(x.dtype)
    return c


def main():
    stage = kit.Stage(__file__, {}, "bound by the matrix products on the device; the readback, the panel's lock and sleep cost nothing")
    dtype = torch.bfloat16 if stage.cuda else torch.float32
    n = stage.pick(32768, 49152, 65536) if not stage.smoke else 512
    k = stage.pick(1536, 2048) if not stage.smoke else 16
    dim = 4096 if not stage.smoke else 32
    x = torch.randn(n, dim, device=stage.device, dtype=dtype)
    c = x[torch.randperm(n, device=stage.device)[:k]].clone()
    panel = Panel()
    for i in range(1 << 60):
        old = c
        c = lloyd(x, c, 0.02, 2)
        shift = (c - old).float().norm().item()
        panel.put(shift)
        if i % 200 == 0:
            gc.collect(0)
        if shift != shift or shift < 1e-5:
            c = x[torch.randperm(n, device=stage.device)[:k]].clone()
        if not stage.tick():
            break
    stage.leave()


if __name__ == "__main__":
    main()
