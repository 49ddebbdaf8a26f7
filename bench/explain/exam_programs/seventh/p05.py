# SPDX-License-Identifier: Apache-2.0
"""Implicit heat/diffusion solve: conjugate gradients on a 3-D grid, one time step after another."""
import torch
import exam_kit
from exam_kit import Cause


class Grid:
    """Seven-point operator with insulated walls."""

    def __init__(self, c):
        self.c = c

    def matvec(self, v):
        y = v * (1 + 6 * self.c)
        for d in range(3):
            n = v.shape[d]
            y.narrow(d, 1, n - 1).sub_(v.narrow(d, 0, n - 1), alpha=self.c)
            y.narrow(d, 0, n - 1).sub_(v.narrow(d, 1, n - 1), alpha=self.c)
        return y


class HeatSolver:
    """Fixed number of iterations a time step; the residual history is looked at for the log."""

    def __init__(self, rng, smoke, dev):
        n = 8 if smoke else rng.choice([144, 160])
        self.grid = Grid(0.3)
        self.u = torch.rand(n, n, n, device=dev)
        self.iters = 3 if smoke else 40
        self.checks = 0.0
        self.credit = 0.0
        self.worst = 0.0
        self.causes = [Cause("synchronization", "HeatSolver.log_scalar", self.set_checks, 1.0, 0.03, 30)]

    def set_checks(self, a, on):
        self.checks = a if on else 0.0
        self.credit = 0.0

    def log_scalar(self, t):
        v = float(t)
        if v > self.worst:
            self.worst = v
        return v

    def solve(self, b):
        x = b.clone()
        r = b - self.grid.matvec(x)
        p = r.clone()
        rr = (r * r).sum()
        for _ in range(self.iters):
            ap = self.grid.matvec(p)
            alpha = rr / ((p * ap).sum() + 1e-12)
            x.addcmul_(p, alpha)
            r.addcmul_(ap, alpha, value=-1)
            new = (r * r).sum()
            p.mul_(new / (rr + 1e-12)).add_(r)
            rr = new
            self.credit += self.checks
            probe = (rr, alpha)
            while self.credit >= 1.0:
                self.credit -= 1.0
                self.log_scalar(probe[int(self.credit) & 1])
        return x

    @torch.no_grad()
    def step(self):
        self.u = self.solve(self.u)
        self.u.clamp_(0, 1).add_(0.001)
        return self.u.mean().item()


if __name__ == "__main__":
    exam_kit.main(HeatSolver, "mid", "residual and step length are read back inside the iteration though only logged")
