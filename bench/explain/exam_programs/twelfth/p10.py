# SPDX-License-Identifier: Apache-2.0
"""Gravitating bodies, advanced in lock-step with a slower viewer."""
import stage
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import torch


@dataclass
class Pacer:
    """Keeps the bodies from running ahead of the viewer."""
    lag: object
    ticks: int = 0
    marks: deque = field(default_factory=lambda: deque(maxlen=256))

    def tick(self):
        self.ticks += 1
        self.marks.append(time.monotonic())
        behind = self.lag() * 1e-5
        if behind > 0:
            time.sleep(behind)


class Orrery:
    def __init__(self, args):
        tiny, self.dev = args.smoke, args.device
        self.count, self.subs = (256, 2) if tiny else (16384, 3)
        self.pos = torch.randn(self.count, 3, device=self.dev)
        self.vel = torch.zeros_like(self.pos)
        self.mass = torch.rand(self.count, 1, device=self.dev)
        self.pull = torch.empty(self.count, self.count, device=self.dev)
        self.lag = stage.Dial(150)
        self.pacer = Pacer(self.lag)

    def forces(self):
        sq = self.pos.square().sum(1)
        torch.addmm(sq[None, :], self.pos, self.pos.T, alpha=-2, out=self.pull)
        self.pull.add_(sq[:, None]).clamp_(min=0).add_(0.05).pow_(-1.5)
        weighted = self.pull @ (self.mass * self.pos)
        return weighted - (self.pull @ self.mass) * self.pos

    def advance(self):
        for _ in range(self.subs):
            self.vel += 1e-6 * self.forces()
            self.pos += 1e-3 * self.vel
        energy = (self.vel.square() * self.mass).sum().item()
        self.pacer.tick()
        return energy


def busy_counter(args):
    seen = 0
    while True:
        for k in range(200):
            seen += k & 3
        time.sleep(0.05)


def main():
    args = stage.arguments()
    torch.manual_seed(args.seed)
    threading.Thread(target=busy_counter, args=(args,), name="render-gil", daemon=True).start()
    bodies = Orrery(args)
    with torch.inference_mode():
        stage.conduct(args, bodies.advance, [bodies.lag])


if __name__ == "__main__":
    main()
