# SPDX-License-Identifier: Apache-2.0
"""Order-book features: running sums over long tick histories of the bid side and of the ask side."""
import contextlib
import torch
import exam_kit
from exam_kit import Cause


class Side:
    def __init__(self, rows, ticks, dev):
        self.x = torch.randn(rows, ticks, device=dev) * 0.01
        self.y = torch.empty_like(self.x)
        self.level = torch.zeros(rows, device=dev)
        self.stream = torch.cuda.Stream() if dev.type == "cuda" else None

    def on(self):
        return torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext()

    def stage(self):
        with self.on():
            torch.cumsum(self.x, 1, out=self.y)
            self.level.mul_(0.9).add_(self.y[:, -1], alpha=0.1)


class Book:
    """Two sides, independent until the spread is taken at the end of a step."""

    def __init__(self, rng, smoke, dev):
        rows = 2 if smoke else rng.choice([8, 12])
        ticks = 500 if smoke else rng.choice([200_000, 300_000])
        self.bid = Side(rows, ticks, dev)
        self.ask = Side(rows, ticks, dev)
        self.stages = 8 if smoke else 32
        self.coupled = 0
        self.causes = [Cause("stream_dependency", "Book.publish_spread", self.set_coupled, 8 if smoke else 12, 1, self.stages, integer=True, also="Book.advance")]

    def set_coupled(self, a, on):
        self.coupled = int(a) if on else 0

    def publish_spread(self):
        """Keep both sides at the same stage."""
        if self.ask.stream is None:
            return
        self.ask.stream.wait_stream(self.bid.stream)

    def advance(self, i):
        self.bid.stage()
        tight = (i * self.coupled) // self.stages != ((i + 1) * self.coupled) // self.stages
        if tight:
            self.publish_spread()
        self.ask.stage()
        if tight and self.ask.stream is not None:
            self.bid.stream.wait_stream(self.ask.stream)

    @torch.no_grad()
    def step(self):
        if self.bid.stream is not None:
            main = torch.cuda.current_stream()
            self.bid.stream.wait_stream(main)
            self.ask.stream.wait_stream(main)
        for i in range(self.stages):
            self.advance(i)
        if self.bid.stream is not None:
            main.wait_stream(self.bid.stream)
            main.wait_stream(self.ask.stream)
        return (self.bid.level - self.ask.level).mean().item()


if __name__ == "__main__":
    exam_kit.main(Book, "mid", "bid and ask streams wait for each other at every coupled stage and no longer overlap")
