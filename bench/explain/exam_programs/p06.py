# SPDX-License-Identifier: Apache-2.0
"""Token-by-token text generation."""
import math
import torch
from runkit import Kit, Net, DEV


def pick(scores, top, rnd):
    """nucleus choice over candidate scores, one row"""
    cand = sorted(enumerate(scores), key=lambda p: -p[1])[:top]
    m = cand[0][1]
    w = [math.exp(v - m) for _, v in cand]
    r, acc = rnd.random() * sum(w), 0.0
    for (k, _), p in zip(cand, w):
        acc += p
        if acc >= r:
            return k
    return cand[-1][0]


def main(kit):
    d, vocab = kit.n(2048, 32), kit.n(16384, 64)
    net = Net(d, kit.n(16, 1), vocab).to(DEV).half().eval() if DEV.type == "cuda" else Net(d, 1, vocab).eval()
    rows = 8
    emb = torch.randn(vocab, d, device=DEV, dtype=next(net.parameters()).dtype)
    tok = torch.zeros(rows, dtype=torch.long, device=DEV)
    seen = {"penalised": 0}

    @torch.no_grad()
    def forward():
        return net(emb[tok])

    def greedy():
        tok.copy_(forward().argmax(-1))
        return tok.tolist()

    base, _ = kit.measure(greedy)
    s = kit.share(0.62, 0.85, 1.15)
    scores = [((i * 7919) % 1000) / 100 for i in range(vocab)]
    need = base * s / (1 - s)
    per_row = need / rows
    width = int(min(vocab, max(32, vocab * per_row / kit.unit(lambda: pick(scores, 50, kit.rng), 5))))
    repeat = max(1, round(per_row / kit.unit(lambda: pick(scores[:width], 50, kit.rng), 5)))
    kit.cause("host_code", kit.place(pick, "sorted("), "pure Python sampling of every token between launches")
    for it in kit.steps():
        if kit.on:
            logits = forward()[:, :width].float().cpu().tolist()
            out = []
            for row in logits:
                for _ in range(repeat):
                    k = pick(row, 50, kit.rng)
                out.append(k)
            tok.copy_(torch.tensor(out))
        else:
            greedy()


if __name__ == "__main__":
    main(Kit(__file__))
