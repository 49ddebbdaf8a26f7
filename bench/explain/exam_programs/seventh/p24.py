# SPDX-License-Identifier: Apache-2.0
"""Protein contact regressor in bfloat16: wide dense layers on a large batch."""
import gc, threading
import torch
import torch.nn as nn
import exam_kit


class StallWatch(threading.Thread):
    """Beats every half second; nobody listens at present."""

    def __init__(self):
        super().__init__(daemon=True, name="gil-hog")
        self.halt = threading.Event()
        self.lock = threading.Lock()
        self.beats = 0

    def run(self):
        while not self.halt.wait(0.5):
            with self.lock:
                self.beats += 1


class Contacts:
    causes = []

    def __init__(self, rng, smoke, dev):
        gc.disable()
        self.dev = dev
        d = 32 if smoke else rng.choice([7168, 8192])
        self.b = 16 if smoke else 16384
        self.net = nn.Sequential(nn.Linear(d, d, bias=False), nn.ReLU(), nn.Linear(d, d, bias=False), nn.ReLU(), nn.Linear(d, d, bias=False))
        self.net = self.net.to(dev, torch.bfloat16)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        self.x = torch.randn(self.b, d, device=dev, dtype=torch.bfloat16)
        self.y = torch.randn(self.b, d, device=dev, dtype=torch.bfloat16)
        self.n = 0
        self.watch = StallWatch()
        self.watch.start()

    def wait_for_stragglers(self):
        with self.watch.lock:
            return self.watch.beats

    def slow_path(self):
        out = self.net(self.x)
        loss = nn.functional.mse_loss(out, self.y)
        self.opt.zero_grad(set_to_none=False)
        loss.backward()
        self.opt.step()
        return loss

    def step(self):
        self.wait_for_stragglers()
        loss = self.slow_path()
        self.n += 1
        if self.n % 8 == 0:
            self.last = loss.item()

    def close(self):
        self.watch.halt.set()


if __name__ == "__main__":
    exam_kit.main(Contacts, "healthy", "healthy: limited by bfloat16 matrix products")
