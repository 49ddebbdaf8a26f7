# SPDX-License-Identifier: Apache-2.0
"""Spectral fluid solver with floating tracers that are kept apart by springs."""
import time

import torch

import stage


class Fluid:
    def __init__(self, n, dev):
        self.u = torch.randn(n, n, n, device=dev) * 0.1
        k = torch.fft.fftfreq(n, device=dev) * n
        kz = torch.fft.rfftfreq(n, device=dev) * n
        self.damp = torch.exp(-1e-5 * (k[:, None, None] ** 2 + k[None, :, None] ** 2 + kz[None, None, :] ** 2))
        self.n = n

    def diffuse(self):
        f = torch.fft.rfftn(self.u)
        f.mul_(self.damp)
        self.u = torch.fft.irfftn(f, s=(self.n,) * 3)

    def advect(self, dt):
        g = torch.roll(self.u, 1, 0) - torch.roll(self.u, -1, 0)
        self.u = self.u - dt * self.u * g
        self.u.clamp_(-1, 1)


class Tracers:
    def __init__(self, n, dev):
        self.x = torch.rand(n, 3, device=dev)
        self.rest = 1.0 / n
        self.rounds = 0

    def move(self, dt):
        self.x.add_(torch.sin(self.x * 6.28), alpha=dt)

    def relax(self):
        """Gauss-Seidel sweeps over the two colours of the chain."""
        for r in range(self.rounds):
            a, b = self.x[r % 2:-1:2], self.x[1 + r % 2::2]
            m = min(len(a), len(b))
            a, b = a[:m], b[:m]
            d = b - a
            length = d.norm(dim=1, keepdim=True) + 1e-6
            push = d * ((length - self.rest) / length) * 0.5
            a.add_(push)
            b.sub_(push)


class World:
    def __init__(self, fluid, tracers, sub):
        self.fluid, self.tracers, self.sub, self.time = fluid, tracers, sub, 0.0

    def tick(self):
        dt = 1e-3
        for _ in range(self.sub):
            self.fluid.diffuse()
            self.fluid.advect(dt)
        self.tracers.move(dt)
        self.tracers.relax()
        self.time += dt


def recompile_watch(world):
    seen = 0.0
    while True:
        time.sleep(0.2)
        seen = max(seen, world.time)


@torch.no_grad()
def main():
    st = stage.Stage()
    world = World(Fluid(st.pick(288, 12), st.device), Tracers(st.pick(2048, 64), st.device), st.pick(6, 2))
    stage.background(recompile_watch, "jit-recompile", world)

    def turn(a):
        world.tracers.rounds = int(a)

    knob = stage.Knob("launch_overhead", "Tracers.relax", turn, st.pick(250, 10), "heavy", alt="World.tick")
    st.perform(world.tick, [knob])


if __name__ == "__main__":
    main()
