# SPDX-License-Identifier: Apache-2.0
"""Particle simulation: many small element-wise updates a step."""
import torch
from runkit import Kit, DEV, sync


def advance(parts, dt):
    for p, v, f in parts:
        f.copy_(p).mul_(-0.5).add_(v, alpha=-0.1)
        v.add_(f, alpha=dt)
        p.add_(v, alpha=dt)


def main(kit):
    n, m = kit.n(kit.rng.randrange(150, 300), 4), kit.n(kit.rng.randrange(500, 4000), 16)
    parts = [[torch.randn(m, device=DEV) for _ in range(3)] for _ in range(n)]
    table = torch.randn(3, n, m, device=DEV)
    flat = [list(table.unbind(0))]

    kit.cause("launch_overhead", kit.place(advance, "f.copy_(p)"), "%d tiny eager kernels a step" % (n * 5))
    for it in kit.steps():
        advance(parts if kit.on else flat, 0.01)
        if it % 50 == 49:
            sync()


if __name__ == "__main__":
    main(Kit(__file__))
