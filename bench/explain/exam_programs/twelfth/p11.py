# SPDX-License-Identifier: Apache-2.0
"""Streaming transcription: an encoder over audio chunks, phrase statistics on the side."""
import stage
import threading
import time
from collections import Counter
from queue import SimpleQueue

import torch
import torch.nn.functional as F
from torch import nn


class Phrasebook:
    """Counts word pairs of what was heard, for later rescoring."""

    def __init__(self, reach):
        self.reach = reach
        self.pairs = Counter()
        self.mail = SimpleQueue()
        self.thread = threading.Thread(target=self._flush, name="disk-flush", daemon=True)
        self.thread.start()

    def heard(self, words):
        self.mail.put(words)

    def _flush(self):
        while True:
            words = self.mail.get()
            last, count = words[-1], len(words)
            for k in range(int(self.reach() * 32)):
                word = (words[k % count] * 31 + k) % 911
                self.pairs[last, word] += 1
                last = word


class Attend(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.mix = nn.Parameter(torch.full((dim,), 0.1))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        h = self.n1(x)
        q, k, v = (f(h).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        x = x + self.mix * (x.roll(1, 1) + x.roll(-1, 1))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Transcriber:
    def __init__(self, args):
        tiny, self.dev = args.smoke, args.device
        self.kind = torch.float32 if tiny else torch.bfloat16
        dim, heads, depth = (64, 4, 2) if tiny else (1024, 16, 12)
        self.batch, self.frames = (2, 32) if tiny else (16, 768)
        self.front = nn.Conv1d(1, dim, 400, 160, 200).to(self.dev, self.kind)
        self.layers = nn.ModuleList(Attend(dim, heads) for _ in range(depth)).to(self.dev, self.kind)
        self.words = nn.Linear(dim, 900).to(self.dev, self.kind)
        self.reach = stage.Dial(20 if tiny else 600)
        self.book = Phrasebook(self.reach)
        self.last = list(range(64))
        self.audio = torch.randn(self.batch, 1, self.frames * 160)
        if not tiny:
            self.audio = self.audio.pin_memory()

    def step(self):
        self.book.heard(self.last)
        chunk = self.audio.to(self.dev, non_blocking=True).to(self.kind)
        x = self.front(chunk).transpose(1, 2)[:, : self.frames]
        for layer in self.layers:
            x = layer(x)
        self.last = self.words(x)[0].argmax(-1).cpu().tolist()


def lock_step(gate):
    while True:
        with gate:
            pass
        time.sleep(0.04)


@torch.no_grad()
def main():
    args = stage.arguments()
    torch.manual_seed(args.seed)
    model = Transcriber(args)
    threading.Thread(target=lock_step, args=(threading.Lock(),), name="contended", daemon=True).start()
    stage.conduct(args, model.step, [model.reach])


if __name__ == "__main__":
    main()
