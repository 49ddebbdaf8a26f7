# SPDX-License-Identifier: Apache-2.0
"""Physics-informed network with a compiled residual (torch.compile) and a growing time window."""
import time
import torch
import torch._dynamo
import torch.nn as nn
from rig import Kit, DEV


class Field(nn.Module):
    def __init__(self, d, depth):
        super().__init__()
        self.first = nn.Linear(3, d)
        self.mid = nn.ModuleList([nn.Linear(d, d) for _ in range(depth)])
        self.last = nn.Linear(d, 2)

    def forward(self, p):
        h = torch.sin(self.first(p))
        for m in self.mid:
            h = h + torch.tanh(m(h))
        return self.last(h)


def residual(u, p, mass):
    wave = u[:, 0] * torch.cos(p[:, 0]) - u[:, 1] * torch.sin(p[:, 1])
    drift = (u - u.mean(0)).square().sum(1)
    pull = torch.exp(-p[:, 2].abs()) * wave
    return (wave.square() + 0.1 * drift + mass * pull).mean()


class Curriculum:
    """moves the time window forward"""
    def __init__(self):
        self.window, self.every, self.moves = 0.1, 10, 0

    def advance(self, i):
        if i % self.every == 0:
            self.move()

    def move(self):
        self.window = 0.1 + (self.window + 0.05) % 0.9
        self.moves += 1
        torch._dynamo.reset()                   # frees the old residual

    def slide(self, i):
        if i % self.every == 0:
            self.window = 0.1 + (self.window + 0.05) % 0.9
            self.moves += 1


class Solver:
    def __init__(self, d, depth, points):
        self.net = Field(d, depth).to(DEV)
        self.opt = torch.optim.Adam(self.net.parameters(), 1e-4, foreach=True)
        self.points = torch.rand(points, 3, device=DEV)
        self.residual = torch.compile(residual, backend="eager", dynamic=False)
        self.mass = torch.tensor(0.3, device=DEV)
        self.value = 0.0

    def step(self, window=0.1):
        p = self.points * window
        loss = self.residual(self.net(p), p, self.mass)
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        self.opt.step()
        self.value = loss.item()


def copy_weights(net):
    """counts the parameters for the log"""
    return sum(p.numel() for p in net.parameters())


def main():
    kit = Kit(__file__)
    rng = kit.rng
    s = Solver(kit.n(rng.choice([1024, 1280]), 16), kit.n(rng.choice([6, 8]), 1),
               kit.n(rng.choice([12288, 16384]), 64))
    s.step()
    base, _ = kit.measure(s.step, 25)
    cur = Curriculum()
    share = kit.share(0.22)

    def moved():
        cur.move()
        s.step()

    moved()
    moved()
    t = time.perf_counter()
    for _ in range(4):
        moved()
    cost = max(1e-4, (time.perf_counter() - t) / 4 - base)
    cur.every = max(1, min(400, round(cost * (1 - share) / share / base)))
    kit.cause("recompilation", kit.place(Curriculum.move, "torch._dynamo.reset()"),
              "every move of the window throws the compiled code away", "Curriculum.move")
    for i in kit.steps(warm=max(6, min(120, cur.every + 1))):
        if kit.on:
            cur.advance(i)
        else:
            cur.slide(i)
        s.step(cur.window)
        if i % 50 == 0:
            copy_weights(s.net)


if __name__ == "__main__":
    main()
