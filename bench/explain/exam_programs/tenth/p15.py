# SPDX-License-Identifier: Apache-2.0
"""Streaming speech recognition: chunks arrive from a generator and are transcribed one after the other."""
import itertools
import time

import torch
import torch.nn.functional as F
from torch import nn

import stage


class Conformerish(nn.Module):
    def __init__(self, d, depth, heads):
        super().__init__()
        self.inp = nn.Linear(80, d)
        self.conv = nn.ModuleList(nn.Conv1d(d, d, 15, padding=7, groups=d) for _ in range(depth))
        self.att = nn.ModuleList(nn.TransformerEncoderLayer(d, heads, 4 * d, 0.0, F.gelu, batch_first=True, norm_first=True)
                                 for _ in range(depth))
        self.out = nn.Linear(d, 1024)

    def forward(self, mel):
        h = self.inp(mel)
        for c, a in zip(self.conv, self.att):
            h = h + c(h.transpose(1, 2)).transpose(1, 2)
            h = a(h)
        return self.out(h)


class BeatKeeper:
    """Keeps the mixer and the recogniser in step."""

    def __init__(self):
        self.gap, self.late = 0.0, 0

    def align(self, n):
        if self.gap > 0:
            time.sleep(self.gap)
        else:
            self.late += 1
        return n


def chunks(keeper, batch, frames, dev, dtype):
    mel = torch.randn(8, batch, frames, 80)
    if dev == "cuda":
        mel = mel.pin_memory()
    for n in itertools.count():
        keeper.align(n)
        yield mel[n % 8].to(dev, non_blocking=True).to(dtype)


def greedy(best):
    """Collapses repeats, drops blanks."""
    text = []
    for row in best:
        last, keep = -1, []
        for c in row:
            if c != last and c != 0:
                keep.append(c)
            last = c
        text.append(keep)
    return text


def gc_pause_logger():
    while True:
        time.sleep(0.01)


@torch.no_grad()
def main():
    st = stage.Stage()
    dev, dtype = st.device, torch.bfloat16
    net = Conformerish(st.pick(1024, 32), st.pick(10, 2), st.pick(16, 2)).to(dev, dtype).train()
    keeper = BeatKeeper()
    feed = chunks(keeper, st.pick(64, 2), st.pick(320, 32), dev, dtype)
    stage.background(gc_pause_logger, "pause-logger")
    said = []

    def transcribe():
        with torch.no_grad():
            best = net(next(feed)).argmax(-1)[:2, :64]
        said.extend(greedy(best.tolist()))
        del said[:-64]

    def turn(a):
        keeper.gap = float(a)

    knob = stage.Knob("pause", "BeatKeeper.align", turn, 0.003, "light", alt="chunks", whole=False)
    st.perform(transcribe, [knob])


if __name__ == "__main__":
    main()
