# SPDX-License-Identifier: Apache-2.0
"""Lattice Boltzmann flow in a channel (D2Q9, streamed by rolls)."""
import torch

import exam_kit as kit

C = [(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1)]
W = [4 / 9] + [1 / 9] * 4 + [1 / 36] * 4


class Lattice:
    def __init__(self, ny, nx, dev):
        self.f = torch.stack([torch.full((ny, nx), w, device=dev) for w in W])
        self.f += 0.001 * torch.rand(self.f.shape, device=dev)
        self.old = torch.empty_like(self.f)
        self.guard = 0                          # planes treated by the positivity guard, in turn
        self.unit = torch.ones((), device=dev)

    def stream(self):
        for i, (cx, cy) in enumerate(C):
            self.old[i] = torch.roll(self.f[i], (cy, cx), (0, 1))
        self.f, self.old = self.old, self.f

    def macroscopic(self):
        rho = self.f.sum(0)
        ux = (self.f[1] + self.f[5] + self.f[8] - self.f[3] - self.f[6] - self.f[7]) / rho
        uy = (self.f[2] + self.f[5] + self.f[6] - self.f[4] - self.f[7] - self.f[8]) / rho
        return rho, ux, uy

    def collide(self, rho, ux, uy, omega=1.2):
        base = 1 - 1.5 * (ux * ux + uy * uy)
        for i, (cx, cy) in enumerate(C):
            cu = cx * ux + cy * uy
            eq = W[i] * rho * (base + 3 * cu + 4.5 * cu * cu)
            self.f[i].lerp_(eq, omega)

    def positivity(self):
        for k in range(self.guard):
            plane = self.f[k % 9]
            plane.copy_(plane.clamp_min(0.0).mul_(self.unit))


class CompileQueue(kit.Job):
    detail = "a positivity guard goes over the populations again and again though nothing is ever negative"

    def __init__(self, ctx):
        self.lat = Lattice(ctx.pick(16, 2048, 3072), ctx.pick(32, 4096), ctx.dev)
        self.levers = [kit.Lever("device_memory_bandwidth", "Lattice.positivity", self.set_guard,
                                 ctx.share(0.43, 0.56), start=ctx.pick(3, 12))]

    def set_guard(self, a):
        self.lat.guard = a

    def step(self):
        for _ in range(2):
            self.lat.stream()
            rho, ux, uy = self.lat.macroscopic()
            self.lat.collide(rho, ux, uy)
            self.lat.positivity()
        return rho[::64, ::64].mean().item()


if __name__ == "__main__":
    kit.main(CompileQueue)
