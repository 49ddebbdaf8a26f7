# SPDX-License-Identifier: Apache-2.0
"""Two-hop neighbourhood training on a random graph."""
import threading
import torch
import torch.nn.functional as F
from rig import Kit, Net, DEV


class Graph:
    def __init__(self, n, deg, rng):
        self.n, self.rng = n, rng
        self.near = {v: [rng.randrange(n) for _ in range(rng.randint(2, deg))] for v in range(n)}

    def kernel(self, seeds):
        """fan-out of two hops, deduplicated, in order of first visit"""
        seen, order = set(), []
        for v in seeds:
            for u in self.near[v]:
                for w in self.near[u]:
                    if w not in seen and (w ^ v) & 3:
                        seen.add(w)
                        order.append(w)
        return order


def main(kit):
    n, d, k = kit.n(40000, 500), kit.n(512, 16), kit.n(8192, 32)
    g = Graph(n, 12, kit.rng)
    feat = torch.randn(n, d, device=DEV)
    net = Net(d, kit.n(6, 1), 40).to(DEV)
    opt = torch.optim.Adam(net.parameters(), 1e-4)
    threading.Thread(target=threading.Event().wait, name="loader", daemon=True).start()
    fixed = [torch.randint(0, n, (k,), device=DEV) for _ in range(4)]

    def fit(idx):
        opt.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(feat[idx]), idx % 40)
        loss.backward()
        opt.step()

    base, host = kit.measure(lambda: fit(fixed[0]))
    unit = kit.unit(lambda: g.kernel(range(200)), 10) / 200
    seeds = max(4, int(kit.extra_host(base, host, kit.share(0.68, 0.95, 1.15)) / unit))
    kit.cause("host_code", kit.place(Graph.kernel, "seen.add"), "neighbours are sampled in pure Python between launches")
    for it in kit.steps():
        if kit.on:
            order = g.kernel([kit.rng.randrange(n) for _ in range(seeds)])
            idx = torch.tensor((order * (k // len(order) + 1))[:k]).to(DEV)
        else:
            idx = fixed[it % 4]
        fit(idx)


if __name__ == "__main__":
    main(Kit(__file__))
