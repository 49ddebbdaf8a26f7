# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python3
"""Pollutant transport in a river basin: advection-diffusion on a large grid with point inlets."""
import torch

from bench_kit import Pacer, mean_step, options, truth, tune, two_phases


class Basin:
    def __init__(self, o):
        self.n = 64 if o.smoke else o.rng.choice([3072, 3584, 4096])
        g = torch.Generator().manual_seed(o.seed)
        n = self.n
        self.c = torch.rand(n, n, generator=g).to(o.device)
        self.tmp = torch.empty_like(self.c)
        self.u = (torch.rand(n, n, generator=g) * 0.1).to(o.device)
        self.v = (torch.rand(n, n, generator=g) * 0.1).to(o.device)
        m = 64 if o.smoke else 6000
        self.ix = torch.randint(1, n - 1, (m,), generator=g)
        self.iy = torch.randint(1, n - 1, (m,), generator=g)
        self.flow = torch.rand(m, generator=g)
        self.spots = list(zip(self.ix.tolist(), self.iy.tolist(), self.flow.tolist()))
        self.dev_ix, self.dev_iy = self.ix.to(o.device), self.iy.to(o.device)
        self.dev_flow = self.flow.to(o.device)
        self.one_by_one = 0
        self.pacer = Pacer(o.device)

    def transport(self, dt=0.05, k=0.2):
        c = self.c
        mid = c[1:-1, 1:-1]
        lap = c[2:, 1:-1] + c[:-2, 1:-1]
        lap.add_(c[1:-1, 2:]).add_(c[1:-1, :-2]).sub_(mid, alpha=4.0)
        adv = (c[2:, 1:-1] - c[:-2, 1:-1]).mul_(self.u[1:-1, 1:-1])
        adv.addcmul_(self.v[1:-1, 1:-1], c[1:-1, 2:] - c[1:-1, :-2])
        lap.mul_(k).sub_(adv, alpha=0.5)
        torch.add(mid, lap, alpha=dt, out=self.tmp[1:-1, 1:-1])
        self.tmp[0], self.tmp[-1] = self.tmp[1], self.tmp[-2]
        self.tmp[:, 0], self.tmp[:, -1] = self.tmp[:, 1], self.tmp[:, -2]
        self.c, self.tmp = self.tmp, self.c

    def feed_inlets(self, dt=0.05):
        k = self.one_by_one
        for x, y, q in self.spots[:k]:
            self.c[x, y].add_(q * dt)
        if k < len(self.spots):
            self.c.index_put_((self.dev_ix[k:], self.dev_iy[k:]), self.dev_flow[k:] * dt, accumulate=True)

    def serialize_bandwidth(self):
        """Mass balance, kept on the device."""
        self.mass = self.c.sum()

    def advance(self):
        for _ in range(3):
            self.transport()
        self.feed_inlets()
        self.serialize_bandwidth()
        self.pacer.tick()


def simulate():
    o = options()
    share = o.rng.uniform(0.46, 0.62)
    sim = Basin(o)
    mean_step(sim.advance, 0.1 if o.smoke else 0.6, o.device)
    base = mean_step(sim.advance, o.probe, o.device)

    def spots(n):
        sim.one_by_one = n

    def measure(n):
        spots(n)
        return mean_step(sim.advance, o.probe, o.device)

    n = tune(measure, base, share, 16 if o.smoke else 400, len(sim.spots))
    on, off = two_phases(sim.advance, o, lambda: spots(n), lambda: spots(0))
    truth(on, off, "launch_overhead", "Basin.feed_inlets", f"{n} inlets updated by one tiny kernel each, every step")


if __name__ == "__main__":
    simulate()
