# SPDX-License-Identifier: Apache-2.0
"""Image sampling by denoising: an 8-bit-latent U-net, one request is a chain of replayed steps."""
import kit
import math
import torch
from torch import nn


class Res(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a, self.b = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1)
        self.n = nn.GroupNorm(8, c)

    def forward(self, x):
        return x + self.b(torch.nn.functional.silu(self.a(self.n(x))))


class UNet(nn.Module):
    def __init__(self, c, depth):
        super().__init__()
        self.inp, self.out = nn.Conv2d(4, c, 3, padding=1), nn.Conv2d(c, 4, 3, padding=1)
        self.down = nn.ModuleList([Res(c) for _ in range(depth)])
        self.mid = nn.ModuleList([Res(c) for _ in range(depth)])
        self.up = nn.ModuleList([Res(c) for _ in range(depth)])

    def forward(self, x):
        h = self.inp(x)
        for m in self.down:
            h = m(h)
        s = h
        h = nn.functional.avg_pool2d(h, 2)
        for m in self.mid:
            h = m(h)
        h = nn.functional.interpolate(h, scale_factor=2.0) + s
        for m in self.up:
            h = m(h)
        return self.out(h)


class Plan:
    """The step for one guidance value; kept by value in the sampler's book."""

    def __init__(self, sampler, guidance):
        self.sampler, self.guidance = sampler, guidance
        self.graph = None

    def trace(self):
        s = self.sampler
        if not s.stage.cuda:
            s.update(self.guidance)
            return self
        self.graph = torch.cuda.CUDAGraph()
        s.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s.side):
            self.graph.capture_begin(pool=s.pool)
            s.update(self.guidance)
            self.graph.capture_end()
        torch.cuda.current_stream().wait_stream(s.side)
        return self

    def replay(self):
        if self.graph is None:
            self.sampler.update(self.guidance)
        else:
            self.graph.replay()


class Sampler:
    def __init__(self, stage, net, batch, size):
        self.stage, self.net = stage, net
        self.x = torch.randn(batch, 4, size, size, device=stage.device)
        if stage.cuda:
            self.side, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                for _ in range(3):
                    self.update(4.0)
            torch.cuda.synchronize()
        self.book = {4.0: Plan(self, 4.0).trace()}
        self.lookups = 0

    @torch.no_grad()
    def update(self, guidance):
        eps = self.net(self.x)
        self.x.copy_((self.x - 0.05 * eps).clamp(-4, 4) * (1.0 + guidance * 1e-6))

    def lookup(self, fresh):
        """The plan for this request."""
        plan = self.book[4.0]
        for _ in range(fresh):
            self.lookups += 1
            key = 4.0 + math.ulp(4.0) * self.lookups
            plan = self.book[key] = Plan(self, key).trace()
            while len(self.book) > 4:
                self.book.pop(next(k for k in self.book if k != 4.0))
        return plan

    def request(self, steps):
        self.x.normal_()
        plan = self.lookup(self.stage.times("a"))
        for _ in range(steps):
            plan.replay()
        return float(self.x.abs().mean())


def main():
    stage = kit.Stage(__file__, {
        "a": kit.Part("recompilation", "Plan.trace", kit.MIDDLE, start=1.0, least=0.02, most=60, alt="Sampler.lookup"),
    }, "the graph is captured again for keys that differ in the last digit", window=0.8)
    c = stage.pick(96, 128) if not stage.smoke else 16
    depth = stage.pick(4, 5, 6) if not stage.smoke else 1
    net = UNet(c, depth).to(stage.device).eval()
    torch.set_float32_matmul_precision("high")
    sampler = Sampler(stage, net, stage.pick(4, 6, 8) if not stage.smoke else 1, 64 if not stage.smoke else 16)
    steps = stage.pick(8, 10, 12) if not stage.smoke else 2
    shade = 0.0
    while True:
        shade = 0.9 * shade + 0.1 * sampler.request(steps)
        if not stage.tick():
            break
    stage.leave()


if __name__ == "__main__":
    main()
