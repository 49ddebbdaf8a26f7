# SPDX-License-Identifier: Apache-2.0
"""Matrix factorisation of a big catalogue."""
import torch
import torch.nn.functional as F
from rig import Kit, DEV


class Catalogue:
    def __init__(self, n, d):
        self.w = torch.zeros(n, d, device=DEV).normal_(0, 0.02)

    def whole(self, ids, net, lr):
        w = self.w.requires_grad_(True)
        net(F.embedding(ids, w)).square().mean().backward()
        with torch.no_grad():
            w.sub_(w.grad, alpha=lr)
        w.grad = None
        self.w = w.detach()

    def part(self, ids, net, lr):
        rows = self.w[ids].requires_grad_(True)
        net(rows).square().mean().backward()
        self.w.index_add_(0, ids, rows.grad, alpha=-lr)


def main(kit):
    n, d = kit.n(kit.rng.choice([16_000_000, 24_000_000, 32_000_000]), 500), kit.n(64, 8)
    table = Catalogue(n, d)
    net = torch.nn.Sequential(torch.nn.Linear(d, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).to(DEV)
    for p in net.parameters():
        p.requires_grad_(False)
    ids = [torch.randint(0, n, (kit.n(16384, 32),), device=DEV) for _ in range(8)]
    kit.cause("device_memory_bandwidth", kit.place(Catalogue.whole, "w.sub_("), "dense gradient of the table: all of it is zeroed, read and written each step")
    for it in kit.steps():
        (table.whole if kit.on else table.part)(ids[it % 8], net, 0.01)


if __name__ == "__main__":
    main(Kit(__file__))
