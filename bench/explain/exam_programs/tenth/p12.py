# SPDX-License-Identifier: Apache-2.0
"""Session-based recommendation: a ledger of open sessions lives beside the sequence model that is trained."""
import gc
import random
import time

import torch
import torch.nn.functional as F
from torch import nn

import stage


class Session:
    __slots__ = ("user", "clicks", "peer", "extra")

    def __init__(self, user):
        self.user, self.clicks, self.peer, self.extra = user, [user], None, {"seen": [user]}


class Ledger:
    """Open sessions; every session knows its predecessor and the other way round."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.open, self.every, self.beat, self.keep = [], 3, 0, 0

    def grow(self, n):
        while len(self.open) < n:
            s = Session(len(self.open))
            if self.open:
                s.peer = self.open[-1]
                self.open[-1].extra["next"] = s
            self.open.append(s)
        if len(self.open) > n > 0:
            del self.open[n:]
            self.open[-1].extra.pop("next", None)

    def click(self, ids):
        for i in ids:
            if self.open:
                s = self.open[i % len(self.open)]
                s.clicks.append(i)
                if len(s.clicks) > 8:
                    s.clicks = s.clicks[-4:]

    def rotate(self):
        """Closes what has expired; called after every batch."""
        self.beat += 1
        if self.keep and self.beat % self.every == 0:
            return gc.collect()
        return 0


class SeqModel(nn.Module):
    def __init__(self, items, d, depth, heads):
        super().__init__()
        self.emb = nn.Embedding(items, d)
        self.rnn = nn.ModuleList(nn.TransformerEncoderLayer(d, heads, 4 * d, 0.0, "gelu", batch_first=True, norm_first=True)
                                 for _ in range(depth))

    def forward(self, ids):
        h = self.emb(ids)
        for f in self.rnn:
            h = f(h)
        return h[:, -1]


def main():
    st = stage.Stage()
    dev = st.device
    items, batch, length = st.pick(20_000, 200), st.pick(128, 4), st.pick(64, 8)
    net = SeqModel(items, st.pick(1024, 32), st.pick(6, 1), st.pick(16, 2)).to(dev)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=not st.smoke)
    ledger = Ledger(st.seed)
    stage.background(lambda: [time.sleep(0.35) for _ in iter(int, 1)], "lock-janitor")
    loss_of = {}

    def train_batch():
        ids = torch.randint(0, items, (batch, length + 1))
        ledger.click(ids[:, 0].tolist())
        ids = ids.to(dev)
        with torch.autocast(dev, dtype=torch.bfloat16):
            h = net(ids[:, :-1])
            logits = h @ net.emb.weight.T
        loss = F.cross_entropy(logits.float(), ids[:, -1])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        loss_of["train"] = loss.item()
        ledger.rotate()

    for _ in range(2):
        train_batch()
    gc.collect()
    gc.freeze()                 # what start-up left behind need not be looked at again
    gc.set_threshold(200_000, 50, 1000)

    def turn(a):
        ledger.keep = int(a)
        if a:
            ledger.grow(int(a))

    knob = stage.Knob("gc", "Ledger.rotate", turn, st.pick(15_000, 8000), "light", alt="main.train_batch",
                      top=600_000)
    st.perform(train_batch, [knob], period=3)


if __name__ == "__main__":
    main()
