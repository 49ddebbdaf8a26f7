# SPDX-License-Identifier: Apache-2.0
"""Batched text generation: the forward pass is a captured graph, sampling is guarded against loops."""
import math
import time
from collections import deque

import torch
import torch.nn.functional as F

import stage


class Decoder:
    """Small decoder with a static cache; weights are random, shapes are those of a 1B model."""

    def __init__(self, dev, layers, dim, heads, ctx, batch, vocab, draft):
        dt = torch.bfloat16
        self.heads, self.hd, self.dim = heads, dim // heads, dim
        r = lambda *s: torch.randn(*s, device=dev, dtype=dt) / math.sqrt(s[-1])
        self.layers = [dict(qkv=r(3 * dim, dim), o=r(dim, dim), up=r(4 * dim, dim), down=r(dim, 4 * dim),
                            k=r(batch, heads, ctx, self.hd), v=r(batch, heads, ctx, self.hd)) for _ in range(layers)]
        self.emb, self.head = r(vocab, dim), r(vocab, dim)
        self.tokens = torch.zeros(batch, draft, dtype=torch.long, device=dev)

    def forward(self):
        h = F.embedding(self.tokens, self.emb)
        b, t, d = h.shape
        for w in self.layers:
            q, k, v = F.linear(F.layer_norm(h, (d,)), w["qkv"]).view(b, t, 3, self.heads, self.hd).permute(2, 0, 3, 1, 4)
            w["k"][:, :, :t].copy_(k)
            w["v"][:, :, :t].copy_(v)
            a = F.scaled_dot_product_attention(q, w["k"], w["v"]).transpose(1, 2).reshape(b, t, d)
            h = h + F.linear(a, w["o"])
            h = h + F.linear(F.gelu(F.linear(F.layer_norm(h, (d,)), w["up"])), w["down"])
        return F.linear(h[:, -1], self.head).float().topk(4, dim=-1).indices


class LoopGuard:
    """No sequence may repeat a trigram of its recent past."""

    def __init__(self, batch, keep):
        self.past = [deque([(7 * i + 13 * j) % 251 for j in range(keep)], maxlen=keep) for i in range(batch)]
        self.span = 0

    def choose(self, row, options):
        past = self.past[row]
        span = min(self.span, len(past))
        if span > 3:
            recent = list(past)[-span:]
            seen = {}
            for a, b, c in zip(recent, recent[1:], recent[2:]):
                seen.setdefault((a, b), set()).add(c)
            banned = seen.get((recent[-2], recent[-1]), ())
            for o in options:
                if o not in banned:
                    past.append(o)
                    return o
        past.append(options[0])
        return options[0]


def gpu_poll():
    while True:
        time.sleep(0.4)


@torch.no_grad()
def main():
    st = stage.Stage()
    batch, draft = st.pick(64, 4), st.pick(16, 2)
    net = Decoder(st.device, st.pick(20, 2), st.pick(2048, 32), st.pick(16, 2), st.pick(512, 16), batch,
                  st.pick(32000, 300), draft)
    replay, top = st.graph(net.forward)
    guard = LoopGuard(batch, 2048)
    stage.background(gpu_poll, "gpu-sync-wait")
    fresh = torch.zeros(batch, dtype=torch.long, pin_memory=not st.smoke)

    def generate():
        replay()
        rows = top.tolist()
        for i, options in enumerate(rows):
            fresh[i] = guard.choose(i, options)
        net.tokens[:, -1].copy_(fresh, non_blocking=True)

    def turn(a):
        guard.span = int(a) + 3 if a else 0

    knob = stage.Knob("host_code", "LoopGuard.choose", turn, st.pick(400, 60), "heavy", alt="main.generate", top=2040)
    st.perform(generate, [knob])


if __name__ == "__main__":
    main()
