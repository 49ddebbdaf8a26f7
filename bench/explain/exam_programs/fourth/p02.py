# SPDX-License-Identifier: Apache-2.0
# token-by-token generation with a small decoder-only model, eager mode
import torch
import torch.nn.functional as F
from rig import Job

job = Job(0.21, 0.44)
D = job.pick(1536, 2048, tiny=64)
L = job.pick(8, 10, 12, tiny=2)
B = job.pick(48, 64, tiny=2)
CTX = job.pick(1024, 1536, tiny=16)
H = D // 64 if D >= 64 else 1
VOC = 8192 if job.cuda else 128


class Guard:
    total = 0


class Block:
    def __init__(self, idx):
        w = lambda *s: (torch.randn(*s, device=job.dev, dtype=job.half) * 0.02)
        self.idx = idx
        self.qkv, self.o = w(D, 3 * D), w(D, D)
        self.up, self.down = w(D, 4 * D), w(4 * D, D)
        self.K = w(B, H, CTX, D // H)
        self.V = w(B, H, CTX, D // H)

    def keep_finite(self, x, n):
        for _ in range(n):
            if float(x.abs().amax()) > 6e4:
                x = x * 0.5
        return x

    def write_cache(self, pos, k, v):
        self.K[:, :, pos] = k
        self.V[:, :, pos] = v

    def forward(self, x, pos):
        q, k, v = (F.layer_norm(x, (D,)) @ self.qkv).view(B, 3, H, D // H).unbind(1)
        self.write_cache(pos, k, v)
        a = F.scaled_dot_product_attention(q.unsqueeze(2), self.K, self.V)
        x = x + a.squeeze(2).reshape(B, D) @ self.o
        n = Guard.total // L + (1 if self.idx < Guard.total % L else 0)
        x = self.keep_finite(x, n)
        x = x + F.gelu(F.layer_norm(x, (D,)) @ self.up) @ self.down
        return x


class Generator:
    def __init__(self):
        self.emb = torch.randn(VOC, D, device=job.dev, dtype=job.half) * 0.02
        self.blocks = [Block(i) for i in range(L)]
        self.tok = torch.zeros(B, dtype=torch.long, device=job.dev)
        self.pos = 0

    @torch.inference_mode()
    def next_token(self):
        x = self.emb[self.tok]
        for b in self.blocks:
            x = b.forward(x, self.pos)
        logits = (x @ self.emb.T).float()
        p = torch.softmax(logits / 0.8, -1)
        self.tok = (p / torch.empty_like(p).exponential_(1.0)).argmax(-1)
        self.pos = (self.pos + 1) % CTX
        self.wait_for_tokens()

    def wait_for_tokens(self):
        job.pace(2)


def setk(k):
    Guard.total = int(k)


if __name__ == "__main__":
    with torch.inference_mode():
        gen = Generator()
    job.tune(gen.next_token, setk, L, 60 * L, whole=True)
    job.show(gen.next_token, lambda: setk(0), [("synchronization", "Block.keep_finite")])
