# SPDX-License-Identifier: Apache-2.0
"""Token decoding with a static KV cache, one CUDA graph per token."""
import threading, time
import torch
import torch.nn.functional as F
from rig import Kit, DEV, sync


class Decoder:
    def __init__(self, kit):
        self.d, self.h, self.t = kit.n(2048, 32), kit.n(16, 2), kit.n(kit.rng.choice([2048, 4096]), 16)
        self.b, self.layers, vocab = kit.n(8, 2), kit.n(8, 1), kit.n(32000, 50)
        dt = torch.bfloat16 if DEV.type == "cuda" else torch.float32
        new = lambda *s: torch.randn(*s, device=DEV, dtype=dt) * 0.02
        self.qkv = [new(self.d, 3 * self.d) for _ in range(self.layers)]
        self.ff = [(new(self.d, 4 * self.d), new(4 * self.d, self.d)) for _ in range(self.layers)]
        self.cache = [[new(self.b, self.h, self.t, self.d // self.h) for _ in "kv"] for _ in range(self.layers)]
        self.emb, self.tok = new(vocab, self.d), torch.zeros(self.b, dtype=torch.long, device=DEV)
        self.pos = torch.zeros(1, dtype=torch.long, device=DEV)
        self.count = torch.zeros(self.b, vocab, device=DEV)

    def penalise(self, logits, n):
        for i in range(n):
            logits = logits - self.count * (0.01 / (i + 1))
        return logits

    def token(self, n):
        x = self.emb[self.tok]
        for w, (u, v), (k, val) in zip(self.qkv, self.ff, self.cache):
            q, a, b = (z.view(self.b, self.h, 1, -1) for z in (x @ w).chunk(3, -1))
            k.index_copy_(2, self.pos, a)
            val.index_copy_(2, self.pos, b)
            x = x + F.scaled_dot_product_attention(q, k, val).reshape(self.b, -1)
            x = x + F.gelu(x @ u) @ v
        x = F.layer_norm(x, (self.d,))
        self.tok.copy_(self.penalise((x @ self.emb.T).float(), n).argmax(-1))
        self.pos.add_(1).remainder_(self.t)


@torch.no_grad()
def main(kit):
    m = Decoder(kit)
    plain = kit.graph(lambda: m.token(0))
    probe = kit.graph(lambda: m.token(200))
    base, _ = kit.measure(plain)
    unit = max(1e-7, (kit.measure(probe)[0] - base) / 200)
    s = kit.share(0.48)
    n = max(2, min(kit.n(4000, 4), int(base * s / (1 - s) / unit)))
    heavy = kit.graph(lambda: m.token(n))
    threading.Thread(target=threading.Event().wait, name="python-sampler", daemon=True).start()
    kit.cause("device_compute", kit.place(Decoder.penalise, "logits = logits"), "a chain of %d small kernels inside the graph" % n)
    for it in kit.steps():
        (heavy if kit.on else plain)()
        if it % 32 == 31:
            m.tok.tolist()


if __name__ == "__main__":
    main(Kit(__file__))
