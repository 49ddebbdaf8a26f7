# SPDX-License-Identifier: Apache-2.0
"""Text embedding service: JSON requests are tokenised on the serving thread."""
import json, re
import torch
from runkit import Kit, Net, DEV

WORD = re.compile(r"[a-z]+|\d+")
VOCAB = {}


def tokenise(line):
    doc = json.loads(line)
    return [VOCAB.setdefault(w, len(VOCAB) % 8000) for w in WORD.findall(doc["text"].lower())]


def handle(lines, width):
    ids = [tokenise(l)[:width] for l in lines]
    return torch.tensor([r + [0] * (width - len(r)) for r in ids])


def main(kit):
    d, width, bs = kit.n(1024, 32), kit.n(128, 8), kit.n(kit.rng.choice([16, 32]), 2)
    emb = torch.nn.Embedding(8000, d).to(DEV)
    net = Net(d, kit.n(12, 1), kit.n(256, 8)).to(DEV).eval()
    text = " ".join("Word%d item %s" % (kit.rng.randrange(3000), "abcdefgh"[kit.rng.randrange(8):]) for _ in range(width))

    @torch.no_grad()
    def embed(ids):
        return net(emb(ids)).mean(1).cpu()

    ids0 = torch.randint(0, 8000, (bs, width), device=DEV)
    base, _ = kit.measure(lambda: embed(ids0))
    s = kit.share(0.17)
    line = json.dumps({"text": text})
    n = max(1, round(base * s / (1 - s) / kit.unit(lambda: tokenise(line))))
    lines = [line] * n
    kit.cause("host_code", kit.place(tokenise, "WORD.findall"), "tokenising JSON in Python before each launch")
    for it in kit.steps():
        if kit.on:
            ids = handle(lines, width)
            ids = ids[torch.arange(bs) % len(ids)].to(DEV)
        else:
            ids = ids0
        embed(ids)


if __name__ == "__main__":
    main(Kit(__file__))
