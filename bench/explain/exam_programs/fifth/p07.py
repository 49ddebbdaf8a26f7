# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python3
"""Fraud graph scoring: relational GCN with one sparse adjacency per relation (CSR spmm)."""
import warnings

import torch
import torch.nn as nn

import bench_kit as bk

warnings.filterwarnings("ignore")


def random_csr(n, e, device, gen):
    row = torch.randint(0, n, (e,), generator=gen)
    col = torch.randint(0, n, (e,), generator=gen)
    a = torch.sparse_coo_tensor(torch.stack([row, col]), torch.ones(e) / (e / n), (n, n)).coalesce()
    return a.to_sparse_csr().to(device)


class RelationalLayer(nn.Module):
    def __init__(self, d, adj, busy):
        super().__init__()
        self.adj = adj
        self.busy = busy                              # per relation: mask of nodes with an edge
        self.known = [bool(b.any()) for b in busy]
        self.w = nn.ParameterList(nn.Parameter(torch.randn(d, d) / d ** 0.5) for _ in adj)
        self.root = nn.Linear(d, d)
        self.norm = nn.LayerNorm(d)
        self.probes = [0] * len(adj)

    def is_live(self, r, asked):
        live = self.known[r]
        for _ in range(self.probes[r]):
            live = bool((self.busy[r] & asked).any())
        return live or self.known[r]

    def forward(self, h, asked):
        out = self.root(h)
        for r, a in enumerate(self.adj):
            if self.is_live(r, asked):
                out = out + torch.sparse.mm(a, h @ self.w[r])
        return torch.relu(self.norm(out)) + h


class FraudNet(nn.Module):
    def __init__(self, d, layers, adj, busy):
        super().__init__()
        self.layers = nn.ModuleList(RelationalLayer(d, adj, busy) for _ in range(layers))
        self.head = nn.Linear(d, 2)

    def forward(self, x, asked):
        for ly in self.layers:
            x = ly(x, asked)
        return self.head(x)

    def set_probes(self, total):
        pairs = [(ly, r) for r in range(len(self.layers[0].adj)) for ly in self.layers]
        for i, (ly, r) in enumerate(pairs):
            ly.probes[r] = total // len(pairs) + (1 if i < total % len(pairs) else 0)


def run():
    o = bk.options()
    n, e, d, layers, rel = (300, 900, 16, 2, 3) if o.smoke else \
        (o.rng.choice([24_000, 30_000, 36_000]), 150_000, 192, 5, 6)
    share = o.rng.uniform(0.22, 0.38)
    gen = torch.Generator().manual_seed(o.seed)
    adj = [random_csr(n, e, o.device, gen) for _ in range(rel)]
    busy = [torch.rand(n, generator=gen).to(o.device) < 0.7 for _ in range(rel)]
    torch.backends.cuda.matmul.allow_tf32 = True
    net = FraudNet(d, layers, adj, busy).to(o.device).eval()
    feats = [torch.randn(n, d, device=o.device) for _ in range(3)]
    queries = [torch.rand(n, device=o.device) < 0.5 for _ in range(3)]
    pacer = bk.Pacer(o.device)
    count = 0

    @torch.no_grad()
    def score_io_batch():
        nonlocal count
        k = count % 3
        y = net(feats[k], queries[k])
        count += 1
        pacer.tick()
        return y

    bk.mean_step(score_io_batch, 0.1 if o.smoke else 0.8, o.device)
    base = bk.mean_step(score_io_batch, o.probe, o.device)

    def measure(k):
        net.set_probes(k)
        return bk.mean_step(score_io_batch, o.probe, o.device)

    k = bk.tune(measure, base, share, layers * rel, 30 * layers * rel)
    on, off = bk.two_phases(score_io_batch, o, lambda: net.set_probes(k), lambda: net.set_probes(0))
    bk.truth(on, off, "synchronization", "RelationalLayer.is_live",
             f"{k} device-to-host boolean checks a forward pass")


if __name__ == "__main__":
    run()
