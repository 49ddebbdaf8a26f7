# SPDX-License-Identifier: Apache-2.0
"""Additive synthesiser: each voice integrates its frequency curve, the voices are mixed per block."""
import torch

import exam_kit as kit


class Voice:
    def __init__(self, rows, length, blocks, dev, lane):
        self.curve = torch.rand(blocks, rows, length, device=dev) * 0.01 + 0.001
        self.phase = torch.empty(rows, length, device=dev)
        self.env = torch.empty(rows, length, device=dev)
        self.out = torch.zeros(blocks, rows, length, device=dev)
        self.lane = lane

    def render(self, b):
        torch.cumsum(self.curve[b], 1, out=self.phase)
        torch.sin(self.phase, out=self.env)
        torch.cumsum(self.env, 1, out=self.phase)
        torch.mul(self.phase, 1e-3, out=self.out[b])


class Mixer:
    def __init__(self, voices, blocks):
        self.voices, self.blocks = voices, blocks
        self.aligned = 0                       # blocks in which the voices are kept in order
        self.last = None

    def keep_order(self, voice):
        if voice.lane is None:
            return
        if self.last is not None:
            voice.lane.wait_event(self.last)

    def block(self, b):
        for v in self.voices:
            if b < self.aligned:
                self.keep_order(v)
            with kit.on_stream(v.lane):
                v.render(b)
            if v.lane is not None and b < self.aligned:
                self.last = v.lane.record_event()

    def play(self):
        self.last = None
        if self.voices[0].lane is not None:
            here = torch.cuda.current_stream()
            for v in self.voices:
                v.lane.wait_stream(here)
        for b in range(self.blocks):
            self.block(b)
        if self.voices[0].lane is not None:
            for v in self.voices:
                here.wait_stream(v.lane)
        mix = self.voices[0].out
        for v in self.voices[1:]:
            mix = mix + v.out
        return mix.abs().amax()


class ThrottledSynth(kit.Job):
    detail = "each voice's stream waits for the event of the voice before it, although the voices are independent"

    def __init__(self, ctx):
        n, blocks = ctx.pick(2, 4, 5), ctx.pick(3, 16, 20)
        length = ctx.pick(500, 98304, 131072, 163840)
        lanes = [torch.cuda.Stream() if ctx.cuda else None for _ in range(n)]
        self.mixer = Mixer([Voice(4, length, blocks, ctx.dev, s) for s in lanes], blocks)
        self.levers = [kit.Lever("stream_dependency", "Mixer.keep_order", self.set_aligned, ctx.share(0.43, 0.55),
                                 start=max(1, blocks // 2), hi=blocks, alt="Mixer.block / Voice.render")]

    def set_aligned(self, a):
        self.mixer.aligned = a

    @torch.no_grad()
    def step(self):
        return self.mixer.play().item()


if __name__ == "__main__":
    kit.main(ThrottledSynth)
