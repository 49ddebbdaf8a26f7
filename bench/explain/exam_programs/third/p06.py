# SPDX-License-Identifier: Apache-2.0
"""Language-model training in bf16 with a diagnostic of the hidden states."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from rig import Kit, DEV


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.h = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, d))
        return x + self.ff(self.n2(x))


class LM(nn.Module):
    def __init__(self, vocab, d, heads, depth):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList([Block(d, heads) for _ in range(depth)])
        self.head = nn.Linear(d, vocab, bias=False)
        self.trace = None

    def forward(self, ids):
        x = self.emb(ids)
        for b in self.blocks:
            x = b(x)
        self.trace = x.detach()
        return self.head(x)


class Spectrum:
    """running second moment of the hidden states, for the effective-rank plot"""
    def __init__(self, d):
        self.cov = torch.zeros(d, d, dtype=torch.float64, device=DEV)
        self.slices = 1

    def one(self, h):
        h = h.double()
        self.cov.mul_(0.99).addmm_(h.T, h, alpha=0.01)

    def observe(self, hidden):
        flat = hidden.flatten(0, 1)
        n = max(16, flat.shape[0] // 2)
        for i in range(self.slices):
            lo = (i * n // 2) % max(1, flat.shape[0] - n + 1)
            self.one(flat[lo:lo + n])


def copy_to_host(log, i):
    """notes the step number; the values stay on the device"""
    log[i % len(log)] = i
    return len(log)


def main():
    kit = Kit(__file__)
    rng = kit.rng
    d = kit.n(rng.choice([896, 1024]), 32)
    t = kit.n(rng.choice([512, 640]), 16)
    b = kit.n(rng.choice([8, 10]), 2)
    vocab = kit.n(rng.choice([8000, 10000]), 61)
    with DEV:
        net = LM(vocab, d, d // (128 if d > 64 else 16), kit.n(rng.choice([8, 10]), 1))
    opt = torch.optim.AdamW(net.parameters(), 1e-4, foreach=True)
    share = kit.share(0.45)
    pool = torch.randint(0, vocab, (4, b, t + 1), device=DEV)

    def train(i=0):
        ids = pool[i % 4]
        with torch.autocast(DEV.type, dtype=torch.bfloat16):
            out = net(ids[:, :-1])
            loss = F.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()

    base, _ = kit.measure(train, 20)
    spec = Spectrum(d)
    spec.slices = kit.n(6, 1)
    cost = kit.measure(lambda: spec.observe(net.trace), 8, 2)[0] / spec.slices
    spec.slices = max(1, round(base * share / (1 - share) / cost))
    kit.cause("device_compute", kit.place(Spectrum.one, "addmm_"),
              "float64 covariance of overlapping slices in every step", "Spectrum.one")
    log = [0] * 64
    for i in kit.steps(warm=8):
        train(i)
        copy_to_host(log, i)
        if kit.on:
            spec.observe(net.trace)


if __name__ == "__main__":
    main()
