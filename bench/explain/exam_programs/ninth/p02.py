# SPDX-License-Identifier: Apache-2.0
"""Molecular dynamics: Lennard-Jones argon, all pairs, velocity Verlet, a step is a block of substeps."""
import kit
import threading
import time
import torch


class Recorder(threading.Thread):
    """Keeps a slow trace of the temperature; wakes up twice a second."""

    def __init__(self, box):
        super().__init__(name="disk-trace", daemon=True)
        self.box, self.trace = box, []

    def run(self):
        while True:
            time.sleep(0.5)
            self.trace.append((time.time(), self.box.seen))


class Box:
    def __init__(self, stage, atoms):
        d = stage.device
        side = round(atoms ** (1 / 3)) + 1
        grid = torch.stack(torch.meshgrid(*[torch.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3)[:atoms]
        self.stage = stage
        self.length = side * 1.2
        self.x = (grid.float() * 1.2).to(d)
        self.v = torch.randn(atoms, 3, device=d) * 0.3
        self.eye = torch.eye(atoms, device=d) * 1e6
        self.f, self.virial = self.force()
        self.seen, self.hot = 0.0, 0

    def force(self):
        r = self.x[:, None] - self.x[None]
        r = r - self.length * torch.round(r / self.length)
        d2 = (r * r).sum(-1) + self.eye
        i6 = (1.0 / d2.clamp(min=0.8)) ** 3
        s = 24.0 * (2.0 * i6 * i6 - i6) / d2
        f = (s[..., None] * r).sum(1)
        return f, (s * d2).sum() * 0.5

    def verlet(self, dt):
        self.v = self.v + 0.5 * dt * self.f
        self.x = torch.remainder(self.x + dt * self.v, self.length)
        self.f, self.virial = self.force()
        self.v = (self.v + 0.5 * dt * self.f) * 0.9999

    def thermostat(self, n):
        for _ in range(n):
            if self.virial.item() > 1e9:
                self.hot += 1
                self.v = self.v * 0.5

    def block(self, substeps):
        for _ in range(substeps):
            self.verlet(2e-4)
            self.thermostat(self.stage.times("a", 1.0 / substeps))
        self.seen = float((self.v * self.v).mean())


def main():
    stage = kit.Stage(__file__, {
        "a": kit.Part("synchronization", "Box.thermostat", kit.LIGHT, start=16, least=0.5, most=4000),
    }, "the virial is read back inside the substeps, so the launches never run ahead")
    atoms = stage.pick(640, 768, 900) if not stage.smoke else 60
    substeps = stage.pick(40, 48, 60) if not stage.smoke else 6
    box = Box(stage, atoms)
    Recorder(box).start()
    while True:
        box.block(substeps)
        if not stage.tick():
            break
    stage.leave()


if __name__ == "__main__":
    main()
