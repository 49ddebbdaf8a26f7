# SPDX-License-Identifier: Apache-2.0
"""A controller network and its probe, each on a lane of its own."""
import stage
import contextlib
import threading
import time

import torch


class Lane:
    """A short chain of small maps, prepared once and played often."""

    def __init__(self, dev, rows, dim, hops):
        kind = torch.float32 if dev == "cpu" else torch.bfloat16
        self.maps = [torch.randn(dim, dim, device=dev, dtype=kind) / dim ** 0.5 for _ in range(4)]
        self.state = torch.randn(rows, dim, device=dev, dtype=kind)
        self.spare = torch.empty_like(self.state)
        self.hops, self.graph, self.stream = hops, None, None
        if dev == "cuda":
            self.stream = torch.cuda.Stream()
            with torch.cuda.stream(self.stream):
                self.chain()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.chain()

    def chain(self):
        for k in range(self.hops):
            torch.mm(self.state, self.maps[k % 4], out=self.spare)
            torch.tanh(self.spare, out=self.state)

    def on(self):
        return torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext()

    def play(self, times):
        for _ in range(times):
            self.graph.replay() if self.graph else self.chain()


class Duo:
    def __init__(self, args):
        tiny, dev = args.smoke, args.device
        rows, dim, hops = (16, 32, 4) if tiny else (256, 512, 12)
        self.main, self.probe = Lane(dev, rows, dim, hops), Lane(dev, rows, dim, hops)
        self.plays = 10 if tiny else 64
        self.depth = stage.Dial(3 if tiny else 20, hi=40 if tiny else 256, whole=True, paired=True)
        self.seen = []

    def hand_over(self):
        """The lanes meet once a step, so that the probe's tables may be read."""
        if self.main.stream and self.depth.live:
            self.main.stream.wait_stream(self.probe.stream)

    def step(self):
        if self.main.stream:
            self.probe.stream.wait_stream(self.main.stream)
        with self.probe.on():
            self.probe.play(self.depth.value)
        self.hand_over()
        with self.main.on():
            self.main.play(self.plays)
            mean = self.main.state.float().mean()
            self.seen.append(mean.item())
        if len(self.seen) > 500:
            del self.seen[:400]


def saver(duo):
    """Would write the probe's state if anybody listened."""
    while True:
        time.sleep(0.07)
        len(duo.seen)


def main():
    args = stage.arguments()
    torch.manual_seed(args.seed)
    with torch.inference_mode():
        duo = Duo(args)
        threading.Thread(target=saver, args=(duo,), name="checkpoint-io", daemon=True).start()
        stage.conduct(args, duo.step, [duo.depth], settle=4)


if __name__ == "__main__":
    main()
