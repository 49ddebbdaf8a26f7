# SPDX-License-Identifier: Apache-2.0
"""Text generation: batched decode with a static KV cache in a CUDA graph, sampling rules on the host."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from rig import Kit, DEV


class Layer(nn.Module):
    def __init__(self, d, heads, batch, ctx):
        super().__init__()
        self.h = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.register_buffer("k", torch.zeros(batch, heads, ctx, d // heads))
        self.register_buffer("v", torch.zeros(batch, heads, ctx, d // heads))

    def forward(self, x, pos, mask):
        b, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, 3, self.h, 1, d // self.h).unbind(1)
        self.k.index_copy_(2, pos, k)
        self.v.index_copy_(2, pos, v)
        a = F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask)
        x = x + self.o(a.reshape(b, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Decoder(nn.Module):
    def __init__(self, vocab, d, heads, depth, batch, ctx):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList([Layer(d, heads, batch, ctx) for _ in range(depth)])
        self.head = nn.Linear(d, vocab)

    def forward(self, ids, pos, mask):
        x = self.emb(ids)
        for l in self.layers:
            x = l(x, pos, mask)
        return self.head(x)


def repeated_ngrams(history, n):
    """tokens that would complete an n-gram that the text already has"""
    seen = {}
    for i in range(len(history) - n + 1):
        key = tuple(history[i:i + n - 1])
        seen.setdefault(key, []).append(history[i + n - 1])
    return seen.get(tuple(history[-(n - 1):]), [])


def sync_metrics(state, ids):
    state["tokens"] += len(ids)
    state["distinct"] = 0.99 * state["distinct"] + 0.01 * len(set(ids))
    return state["tokens"]


@torch.no_grad()
def main():
    kit = Kit(__file__)
    rng = kit.rng
    B = kit.n(rng.choice([8, 12, 16]), 2)
    d = kit.n(rng.choice([1536, 2048]), 32)
    ctx = kit.n(rng.choice([384, 512]), 16)
    vocab = kit.n(32000, 97)
    with DEV:
        model = Decoder(vocab, d, d // (128 if d > 128 else 16), kit.n(rng.choice([16, 20]), 2), B, ctx)
    model = model.to(torch.bfloat16) if DEV.type == "cuda" else model
    share = kit.share(0.7, 0.93, 1.1)
    ids = torch.randint(0, vocab, (B,), device=DEV)
    pos = torch.zeros(1, dtype=torch.long, device=DEV)
    slots = torch.arange(ctx, device=DEV)
    penalty = torch.zeros(B, vocab, device=DEV)

    def forward():
        mask = (slots <= pos).view(1, 1, 1, ctx)
        logits = model(ids, pos, mask).float() - penalty
        ids.copy_((logits + torch.rand_like(logits)).argmax(-1))
        pos.add_(1).remainder_(ctx)

    replay = kit.graph(forward)
    state = {"tokens": 0, "distinct": 0.0}
    texts = [[rng.randrange(vocab) for _ in range(4000)] for _ in range(B)]

    def decode():
        replay()
        new = ids.tolist()
        for t, w in zip(texts, new):
            t.append(w)
            del t[0]
        sync_metrics(state, new)
        return new

    base, _ = kit.measure(decode, 60)
    need = base * share / (1 - share)
    unit = kit.unit(lambda: repeated_ngrams(texts[0][:400], 3), 50) / 400
    window = max(8, min(4000, int(need / unit / B)))

    def constrain():
        for row, t in enumerate(texts):
            banned = repeated_ngrams(t[-window:], 3)
            if banned:
                penalty[row, banned[0]] = 1.0

    kit.cause("host_code", kit.place(repeated_ngrams, "seen.setdefault"),
              "n-gram table built anew for every token in pure Python", "repeated_ngrams")
    for i in kit.steps(warm=20):
        decode()
        if kit.on:
            constrain()


if __name__ == "__main__":
    main()
