# SPDX-License-Identifier: Apache-2.0
"""Speech synthesis front end: phoneme states stretched to frames by predicted lengths, then a mel decoder."""
import random
import torch
import torch.nn as nn
import exam_kit
from exam_kit import Cause


class Stretch:
    """Length regulator."""

    def __init__(self, frames):
        self.frames = frames
        self.by_hand = 0

    def attention_core(self, h, starts, ends):
        out = h.new_zeros(self.frames, h.shape[1])
        for i, (a, b) in enumerate(zip(starts, ends)):
            out[a:b] = h[i]
        return out

    def __call__(self, h, dur):
        n = self.by_hand
        head = dur[:n].tolist()
        ends, at = [], 0
        for d in head:
            at += d
            ends.append(at)
        parts = []
        if n:
            starts = [0] + ends[:-1]
            parts.append(self.attention_core(h[:n], starts, ends)[:at])
        if n < len(dur):
            rep = dur[n:].to(h.device)
            parts.append(torch.repeat_interleave(h[n:], rep, dim=0, output_size=self.frames - at))
        return torch.cat(parts)


class Voice:
    def __init__(self, rng, smoke, dev):
        self.dev = dev
        self.r = random.Random(rng.randrange(1 << 30))
        self.n = 40 if smoke else 9000
        self.d = 16 if smoke else rng.choice([448, 512])
        self.enc = nn.Linear(self.d, self.d).to(dev)
        self.dec = nn.Sequential(*[m for _ in range(4) for m in (nn.Conv1d(self.d, self.d, 5, padding=2), nn.GELU())],
                                 nn.Conv1d(self.d, 80, 3, padding=1)).to(dev)
        base = [self.r.randint(2, 8) for _ in range(self.n)]
        self.dur = torch.tensor(base)
        self.stretch = Stretch(sum(base))
        self.causes = [Cause("launch_overhead", "Stretch.attention_core", self.set_hand, 20 if smoke else 500, 2, self.n, integer=True)]

    def set_hand(self, a, on):
        self.stretch.by_hand = int(a) if on else 0

    @torch.no_grad()
    def step(self):
        self.dur = self.dur.roll(-11)
        h = self.enc(torch.randn(self.n, self.d, device=self.dev))
        mel = self.dec(self.stretch(h, self.dur).t().unsqueeze(0))
        return mel.abs().amax().item()


if __name__ == "__main__":
    exam_kit.main(Voice, "high", "one tiny copy kernel per phoneme instead of one repeat_interleave")
