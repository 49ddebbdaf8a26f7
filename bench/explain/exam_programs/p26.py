# SPDX-License-Identifier: Apache-2.0
"""Bucketed sequence scoring: the execution plan is rebuilt when the bucket changes."""
import torch
from runkit import Kit, Net, DEV, sync


class Plan:
    def __init__(self, net, x):
        self.net, self.x = net, x

    @torch.no_grad()
    def build(self):
        sync()
        if DEV.type != "cuda":
            self.y = self.net(self.x)
            return self
        s = torch.cuda.Stream()
        s.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s):
            for _ in range(3):
                self.net(self.x)
        torch.cuda.current_stream().wait_stream(s)
        self.g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.g):
            self.y = self.net(self.x)
        return self

    @torch.no_grad()
    def run(self):
        if DEV.type == "cuda":
            self.g.replay()
        else:
            self.y = self.net(self.x)
        return self.y


def main(kit):
    d = kit.n(1024, 32)
    net = Net(d, kit.n(24, 1)).to(DEV).eval()
    xs = [torch.randn(r, d, device=DEV) for r in ((1024, 1088) if not kit.smoke else (4, 6))]
    plan = Plan(net, xs[0]).build()

    def score(plan):
        return plan.run()[0, 0].item()

    base, _ = kit.measure(lambda: score(plan))
    s = kit.share(0.58, 0.85, 1.2)
    cost = kit.unit(lambda: Plan(net, xs[1]).build(), 3)
    every = max(1, round(cost / (base * s / (1 - s))))
    kit.cause("host_code", kit.place(Plan.build, "with torch.cuda.graph("), "graph captured and warmed up again every %d steps" % every)
    n = 0
    for it in kit.steps():
        n += 1
        if kit.on and n % every == 0:
            plan = Plan(net, xs[(n // every) % 2]).build()
        score(plan)


if __name__ == "__main__":
    main(Kit(__file__))
