# SPDX-License-Identifier: Apache-2.0
"""Streaming music: an autoregressive codec model writes blocks of notes into listeners' sessions."""
import kit
import gc
import threading
import torch
from torch import nn


class Note:
    __slots__ = ("pitch", "prev", "next", "marks")

    def __init__(self, pitch, prev):
        self.pitch, self.prev, self.next, self.marks = pitch, prev, None, []
        if prev is not None:
            prev.next = self


class Session:
    """Listeners' scores; a finished one is dropped with all its notes."""

    def __init__(self, length):
        self.scores = []
        for _ in range(length // 100):
            self.start(range(100))

    def start(self, pitches):
        last = None
        for p in pitches:
            last = Note(p, last)
        self.scores.append(last)

    def turn_page(self, pitches, n):
        self.start(pitches)
        self.scores.pop(0)
        for _ in range(n):
            gc.collect()


class Metronome:
    def __init__(self):
        self.stopped = threading.Event()

    def align(self, ms):
        if ms > 0.0:
            self.stopped.wait(ms * 1e-3)


class Composer(nn.Module):
    def __init__(self, width, depth, pitches, voices):
        super().__init__()
        self.embed = nn.Embedding(pitches, width)
        self.rnn = nn.GRU(width, width, depth, batch_first=True)
        self.mix = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, pitches))
        self.voices = voices

    @torch.inference_mode()
    def block(self, seed, state, rounds):
        for _ in range(rounds):
            h, state = self.rnn(self.embed(seed), state)
            seed = self.mix(h).argmax(-1)
        return seed, state


def main():
    stage = kit.Stage(__file__, {
        "a": kit.Part("sleep_or_remote_wait", "Metronome.align", kit.PAIR, start=2.0, least=0.05),
        "b": kit.Part("gc", "Session.turn_page", kit.PAIR, start=0.1, least=0.003, most=20),
    }, "the metronome waits with a timeout in every block; a full collection at page turns", window=0.75)
    if stage.smoke:
        width, depth, voices, length, rounds = 32, 1, 2, 8, 1
    else:
        width, depth, voices, length, rounds = stage.pick(768, 1024), 2, stage.pick(32, 48), stage.pick(32, 48, 64), stage.pick(3, 4)
    model = Composer(width, depth, 512, voices).to(stage.device).eval()
    gc.collect()
    gc.freeze()
    session = Session(stage.pick(60_000, 90_000) if not stage.smoke else 2000)
    metronome = Metronome()
    seed = torch.zeros(voices, length, dtype=torch.long, device=stage.device)
    state = None
    while True:
        seed, state = model.block(seed, state, rounds)
        pitches = seed[0].tolist()
        session.turn_page(pitches, stage.times("b"))
        metronome.align(stage.amount("a"))
        if not stage.tick():
            break
    stage.leave()


if __name__ == "__main__":
    main()
