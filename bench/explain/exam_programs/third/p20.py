# SPDX-License-Identifier: Apache-2.0
"""Text classifier: byte-pair tokeniser in pure Python, convolutional encoder, orthogonality penalty."""
import threading
import torch
import torch.nn as nn
import torch.nn.functional as F
from rig import Kit, DEV


class Merges:
    def __init__(self, rng, n):
        letters = "abcdefghijklmnopqrstuvwxyz"
        self.rank = {}
        while len(self.rank) < n:
            self.rank.setdefault((rng.choice(letters), rng.choice(letters)), len(self.rank))

    def encode(self, text):
        parts = list(text)
        while True:
            best, at = None, -1
            for i in range(len(parts) - 1):
                r = self.rank.get((parts[i], parts[i + 1]))
                if r is not None and (best is None or r < best):
                    best, at = r, i
            if at < 0:
                return parts
            parts[at:at + 2] = [parts[at] + parts[at + 1]]


class Classifier(nn.Module):
    def __init__(self, vocab, d, depth):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.conv = nn.ModuleList([nn.Conv1d(d, d, 5, 1, 2) for _ in range(depth)])
        self.out = nn.Linear(d, 20)

    def forward(self, ids):
        h = self.emb(ids).transpose(1, 2)
        for c in self.conv:
            h = h + F.gelu(c(h))
        return self.out(h.mean(2))


class Penalty:
    """distance of the wide codebook from orthogonality, with its decorrelation"""
    def __init__(self, rows, d):
        self.book = torch.randn(rows, d, device=DEV) / d ** 0.5
        self.rounds = 1

    def whiten(self):
        gram = self.book @ self.book.T
        self.book.copy_(1.5 * self.book - 0.5 * (gram @ self.book))
        self.book.div_(self.book.norm(dim=1, keepdim=True))

    def apply(self):
        for _ in range(self.rounds):
            self.whiten()


def copy_engine(stop):
    while not stop.wait(0.35):
        pass


def main():
    kit = Kit(__file__)
    rng = kit.rng
    d = kit.n(rng.choice([768, 1024]), 32)
    length = kit.n(rng.choice([256, 320]), 12)
    batch = kit.n(rng.choice([48, 64]), 2)
    vocab = kit.n(8000, 50)
    net = Classifier(vocab, d, kit.n(rng.choice([6, 8]), 1)).to(DEV)
    opt = torch.optim.AdamW(net.parameters(), 1e-4, foreach=True)
    ids = torch.randint(0, vocab, (4, batch, length), device=DEV)
    y = torch.randint(0, 20, (batch,), device=DEV)
    stop = threading.Event()
    threading.Thread(target=copy_engine, args=(stop,), name="copy_engine", daemon=True).start()
    last = 0.0

    def train(i=0):
        nonlocal last
        with torch.autocast(DEV.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(net(ids[i % 4]), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        last = loss.item()

    s_host, s_dev = kit.share(0.2), kit.share(0.22)
    base, _ = kit.measure(train, 20)
    whole = base / (1 - s_host - s_dev)
    merges = Merges(rng, 120)
    words = ["".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(12, 24))) for _ in range(400)]
    unit = kit.unit(lambda: [merges.encode(w) for w in words[:100]], 6) / 100
    texts = max(1, round(whole * s_host / unit))
    pen = Penalty(kit.n(1024, 16), kit.n(rng.choice([1024, 1536]), 16))
    cost = kit.measure(pen.whiten, 20, 4)[0]
    pen.rounds = max(1, round(whole * s_dev / cost))
    kit.cause("host_code", kit.place(Merges.encode, "self.rank.get"),
              "quadratic pair merging in pure Python", "Merges.encode")
    kit.cause("device_compute", kit.place(Penalty.whiten, "self.book @ self.book.T"),
              "fp32 decorrelation rounds in every step", "Penalty.whiten")
    for i in kit.steps(warm=10):
        train(i)
        if kit.on:
            for j in range(texts):
                merges.encode(words[(i + j) % len(words)])
            pen.apply()
            float(pen.book[0, 0])


if __name__ == "__main__":
    main()
