# SPDX-License-Identifier: Apache-2.0
"""Two-dimensional reaction-diffusion (Gray-Scott) with many small heated patches on the plate."""
import random
import torch
import torch.nn.functional as F
from rig import Job


class Plate:
    def __init__(self, job):
        n = self.n = job.pick(2048, 3072, tiny=64)
        self.u = torch.ones(1, 1, n, n, device=job.dev)
        self.v = torch.zeros_like(self.u)
        self.v[..., n // 3:n // 2, n // 3:n // 2] = 0.5
        k = torch.tensor([[.05, .2, .05], [.2, -1, .2], [.05, .2, .05]], device=job.dev)
        self.k = k.view(1, 1, 3, 3)

    def lap(self, a):
        p = F.pad(a, (1, 1, 1, 1), mode="circular")
        return F.conv2d(p, self.k)

    def advance(self):
        uvv = self.u * self.v * self.v
        self.u += 0.16 * self.lap(self.u) - uvv + 0.035 * (1 - self.u)
        self.v += 0.08 * self.lap(self.v) + uvv - 0.095 * self.v


class Patches:
    """Small 4x4 heaters, in disjoint cells of the plate."""

    def __init__(self, plate, count, rng):
        self.plate = plate
        side = plate.n // 8
        cells = rng.sample(range(side * side), min(count, side * side))
        self.at = [((c // side) * 8, (c % side) * 8) for c in cells]
        o = torch.arange(4)
        rows = torch.tensor([a for a, _ in self.at])[:, None, None] + o[None, :, None]
        cols = torch.tensor([b for _, b in self.at])[:, None, None] + o[None, None, :]
        self.flat = (rows * plate.n + cols).reshape(len(self.at), -1).to(plate.u.device)
        self.one_by_one = 0

    def apply(self):
        m = min(self.one_by_one, len(self.at))
        v = self.plate.v[0, 0]
        for a, b in self.at[:m]:
            w = v[a:a + 4, b:b + 4]
            w.mul_(0.999)
            w.add_(1e-4)
        if m < len(self.at):
            f = v.view(-1)
            i = self.flat[m:].reshape(-1)
            f[i] = f[i] * 0.999 + 1e-4


def gc_sweep(plate):
    # cheap sanity range limiting once per step
    plate.u.clamp_(0, 2)


def main():
    job = Job(0.46, 0.74)
    plate = Plate(job)
    patches = Patches(plate, 6000, random.Random(job.args.seed))
    sub = [1]

    def step():
        for _ in range(sub[0]):
            plate.advance()
        patches.apply()
        gc_sweep(plate)
        job.pace(1)

    job.size(step, lambda n: sub.__setitem__(0, n), 4, job.rng.uniform(3, 8), 200)

    def setk(k):
        patches.one_by_one = int(k)

    job.tune(step, setk, 500, len(patches.at), whole=True)
    job.show(step, lambda: setk(0), [("launch_overhead", "Patches.apply")])


if __name__ == "__main__":
    with torch.no_grad():
        main()
