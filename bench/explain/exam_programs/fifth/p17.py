# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python3
"""Offline document embedding: ragged chunks of tokens go one by one through an encoder."""
import threading

import torch
import torch.nn as nn
import torch.nn.functional as F

import bench_kit as bk


class Layer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.gate, self.up, self.down = nn.Linear(d, 3 * d), nn.Linear(d, 3 * d), nn.Linear(3 * d, d)

    def forward(self, x):
        n, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(n, 3, self.heads, -1).permute(1, 2, 0, 3)
        a = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        x = x + self.out(a.transpose(0, 1).reshape(n, d))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class ChunkRunner:
    def __init__(self, o):
        self.o = o
        d, heads, depth, n_chunks = (32, 2, 2, 3) if o.smoke else (1536, 12, 4, o.rng.choice([6, 7, 8]))
        dt = torch.bfloat16 if o.gpu else torch.float32
        self.layers = nn.ModuleList(Layer(d, heads) for _ in range(depth)).to(o.device, dt).eval()
        lens = [o.rng.randrange(24, 48) if o.smoke else o.rng.randrange(2200, 4800) for _ in range(n_chunks)]
        self.docs = [torch.randn(n, d, device=o.device, dtype=dt) for n in lens]
        self.quota = 0
        self.left = 0
        self.spaces = n_chunks * depth
        self.acc, self.pacer = 0.0, bk.Pacer(o.device)

    def trim(self):
        """Housekeeping between layers."""
        self.acc += self.quota / self.spaces
        if self.acc >= 1.0:
            self.acc -= 1.0
            if self.o.gpu:
                torch.cuda.empty_cache()
            else:
                for _ in range(4):
                    torch.empty(1 << 20).fill_(0)

    @torch.no_grad()
    def embed_all(self):
        out = []
        for doc in self.docs:
            x = doc
            for ly in self.layers:
                x = ly(x)
                self.trim()
            out.append(F.normalize(x.mean(0).float(), dim=0))
        self.result = torch.stack(out)
        self.pacer.tick()


class Watch(threading.Thread):
    """Idle; wakes once a second."""

    def __init__(self):
        super().__init__(name="prefetch-worker", daemon=True)
        self.over = threading.Event()

    def run(self):
        while not self.over.wait(1.0):
            pass


def main():
    o = bk.options()
    share = o.rng.uniform(0.46, 0.60)
    r = ChunkRunner(o)
    w = Watch()
    w.start()
    bk.mean_step(r.embed_all, 0.1 if o.smoke else 1.0, o.device)
    base = bk.mean_step(r.embed_all, o.probe, o.device)

    def measure(q):
        r.quota = q
        return bk.mean_step(r.embed_all, o.probe, o.device)

    q = bk.tune(measure, base, share, r.spaces / 3, float(r.spaces), whole=False)
    on, off = bk.two_phases(r.embed_all, o, lambda: setattr(r, "quota", q), lambda: setattr(r, "quota", 0))
    w.over.set()
    bk.truth(on, off, "allocator", "ChunkRunner.trim",
             f"empty_cache about {q:.1f} times a step: blocks go back to the driver and are allocated again")


if __name__ == "__main__":
    main()
