# SPDX-License-Identifier: Apache-2.0
"""Weather emulator on spherical modes: grid -> modes -> mixing -> grid, trained on a synthetic flow."""
import torch
import torch.nn as nn
import exam_kit
from exam_kit import Cause


class Harmonics:
    """Least-squares projection on a fixed set of basis functions."""

    def __init__(self, points, modes, dev):
        lat = torch.linspace(-1.5, 1.5, points, device=dev)[:, None]
        k = torch.arange(1, modes + 1, device=dev)[None, :]
        self.basis = torch.cos(lat * k * 0.5 + 0.1 * k) / points ** 0.5
        self.gram = self.basis.t() @ self.basis + torch.eye(modes, device=dev)
        self.rows = 0

    def fetch_cached_gram(self):
        n = self.rows
        if n:
            part = self.basis[:, :n].t() @ self.basis
            self.gram[:n] = part
            self.gram.diagonal()[:n] += 1.0
        return self.gram

    def analyse(self, field):
        return (field @ self.basis) @ self.fetch_cached_gram() * 0.25

    def synthesise(self, modes):
        return modes @ self.basis.t()


class Emulator:
    def __init__(self, rng, smoke, dev):
        self.dev = dev
        points, modes = (128, 32) if smoke else (rng.choice([12288, 14336]), 3072)
        self.b = 4 if smoke else 1536
        self.h = Harmonics(points, modes, dev)
        self.mix = nn.Sequential(nn.Linear(modes, modes), nn.GELU(), nn.Linear(modes, modes)).to(dev)
        self.opt = torch.optim.SGD(self.mix.parameters(), lr=1e-3)
        self.field = torch.randn(self.b, points, device=dev)
        self.causes = [Cause("device_compute", "Harmonics.fetch_cached_gram", self.set_rows, modes // 4, 8, modes, integer=True)]

    def set_rows(self, a, on):
        self.h.rows = int(a) if on else 0

    def step(self):
        with torch.no_grad():
            x = self.h.analyse(self.field)
        y = self.mix(x)
        out = self.h.synthesise(y)
        loss = (out - self.field).square().mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.field = self.field.roll(3, 1)
        return loss.item()


if __name__ == "__main__":
    exam_kit.main(Emulator, "low", "the Gram matrix of a constant basis is multiplied out again every step")
