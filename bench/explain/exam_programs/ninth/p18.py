# SPDX-License-Identifier: Apache-2.0
"""Machine translation: beam search on the device, sentences scored by n-gram overlap on the side."""
import kit
import collections
import queue
import threading
import torch
from torch import nn


class Judge:
    """N-gram overlap of finished sentences with references."""

    def __init__(self, vocab, length):
        gen = torch.Generator().manual_seed(5)
        self.refs = [torch.randint(0, vocab, (length,), generator=gen).tolist() for _ in range(32)]
        self.inbox = queue.Queue(maxsize=2)
        self.score = 0.0
        threading.Thread(target=self.work, name="background", daemon=True).start()

    @staticmethod
    def grams(tokens, n):
        return collections.Counter(tuple(tokens[i:i + n]) for i in range(len(tokens) - n + 1))

    def work(self):
        while True:
            hyp, passes = self.inbox.get()
            for k in range(passes):
                ref = self.refs[k % len(self.refs)]
                hit = 0
                for n in (1, 2, 3, 4):
                    a, b = self.grams(hyp, n), self.grams(ref, n)
                    hit += sum(min(c, b[g]) for g, c in a.items())
                self.score = 0.99 * self.score + 0.01 * hit

    def offer(self, hyp, passes):
        if passes:
            try:
                self.inbox.put_nowait((hyp, passes))
            except queue.Full:
                pass


class Cell(nn.Module):
    def __init__(self, width, vocab, depth):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.gates = nn.ModuleList([nn.Linear(2 * width, 2 * width) for _ in range(depth)])
        self.cands = nn.ModuleList([nn.Linear(2 * width, width) for _ in range(depth)])
        self.out = nn.Linear(width, vocab)

    def forward(self, token, states):
        x, new = self.embed(token), []
        for g, c, h in zip(self.gates, self.cands, states):
            z, r = torch.sigmoid(g(torch.cat([x, h], -1))).chunk(2, -1)
            n = torch.tanh(c(torch.cat([x, r * h], -1)))
            x = (1 - z) * h + z * n
            new.append(x)
        return torch.log_softmax(self.out(x), -1), new


class Translator:
    def __init__(self, stage, width, vocab, depth, beams, length):
        self.stage, self.width, self.beams, self.length = stage, width, beams, length
        self.cell = Cell(width, vocab, depth).to(stage.device).eval()
        self.depth, self.vocab = depth, vocab

    @torch.inference_mode()
    def sentence(self):
        d = self.stage.device
        states = [torch.randn(self.beams, self.width, device=d) for _ in range(self.depth)]
        token = torch.zeros(self.beams, dtype=torch.long, device=d)
        score = torch.zeros(self.beams, 1, device=d)
        trail = []
        for t in range(self.length):
            logp, states = self.cell(token, states)
            best, flat = (score + logp).view(-1).topk(self.beams)
            parent, token = flat // self.vocab, flat % self.vocab
            states = [s[parent] for s in states]
            score = best[:, None]
            if t % 4 == 3:
                trail.append(token.tolist())
        return [x for row in trail for x in row]


def main():
    stage = kit.Stage(__file__, {
        "a": kit.Part("gil", "Judge.work", kit.HEAVY, start=8, tiny=3, least=0.1, most=5000, alt="Translator.sentence"),
    }, "the judging thread computes in Python and takes the interpreter from the decoder", window=0.9, settle=4)
    if stage.smoke:
        width, vocab, depth, beams, length = 32, 200, 1, 4, 8
    else:
        width, vocab, depth = stage.pick(512, 640), 16000, stage.pick(4, 6)
        beams, length = stage.pick(8, 12), stage.pick(20, 24, 28)
    translator = Translator(stage, width, vocab, depth, beams, length)
    judge = Judge(vocab, 48)
    while True:
        hyp = translator.sentence()
        judge.offer(hyp, stage.times("a"))
        if not stage.tick():
            break
    stage.leave()


if __name__ == "__main__":
    main()
