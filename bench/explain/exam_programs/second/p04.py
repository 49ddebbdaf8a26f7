# SPDX-License-Identifier: Apache-2.0
"""Sparse expert layers at inference."""
import torch
import torch.nn.functional as F
from rig import Kit, DEV


class Experts(torch.nn.Module):
    def __init__(self, d, n):
        super().__init__()
        self.n = n
        self.gate = torch.nn.Linear(d, n)
        self.up = torch.nn.Parameter(torch.randn(n, d, 2 * d) * 0.02)
        self.down = torch.nn.Parameter(torch.randn(n, 2 * d, d) * 0.02)

    def route(self, x):
        return self.gate(x).argmax(-1)

    def rows(self, pick):
        return [(pick == e).nonzero().flatten() for e in range(self.n)]

    def forward(self, x, plan=None):
        pick = self.route(x)
        plan = plan or self.rows(pick)
        out = x.clone()
        for e, r in enumerate(plan):
            out.index_add_(0, r, F.gelu(x[r] @ self.up[e]) @ self.down[e])
        return F.layer_norm(out, out.shape[-1:])


def main(kit):
    d, n, tokens = kit.n(kit.rng.choice([512, 768]), 16), kit.n(kit.rng.choice([16, 24, 32]), 3), kit.n(4096, 32)
    layers = torch.nn.ModuleList([Experts(d, n) for _ in range(kit.n(4, 2))]).to(DEV)
    if DEV.type == "cuda":
        layers.bfloat16()
    dt = layers[0].up.dtype
    batches, plans = [torch.randn(tokens, d, device=DEV, dtype=dt) for _ in range(4)], []
    kit.cause("synchronization", kit.place(Experts.rows, ".nonzero()"), "nonzero for each expert waits for the device")
    with torch.no_grad():
        for b in batches:
            p, x = [], b
            for l in layers:
                p.append(l.rows(l.route(x)))
                x = l(x, p[-1])
            plans.append(p)
        for it in kit.steps():
            x = batches[it % 4]
            for j, l in enumerate(layers):
                x = l(x, None if kit.on else plans[it % 4][j])
            if it % 50 == 49:
                x.float().mean().item()


if __name__ == "__main__":
    main(Kit(__file__))
