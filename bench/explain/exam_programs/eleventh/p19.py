# SPDX-License-Identifier: Apache-2.0
"""Early-exit translation decoder: every layer gets a plan that the host makes."""
import stage
import torch
from torch import nn
from torch.nn import functional as F


class Planner:
    def __init__(self, layers):
        self.costs = [[(i * 31 + k * 17) % 23 for k in range(600)] for i in range(layers)]
        self.probe = stage.Quota()
        self.level = 1.0

    def confidence(self, x):
        """How settled the hidden state is."""
        if self.probe.take():
            self.level = x[0, :8].float().mean().item()
        return self.level

    def plan(self, i, level):
        used, keep = 0, 0
        for c in self.costs[i]:
            if used + c < 4500 and c * level < 1e9:
                used += c
                keep += 1
        for c in reversed(self.costs[i]):
            used -= c
        return 0.5 + 0.5 * keep / 600


class Stack(nn.Module):
    def __init__(self, d, n):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(d, 2 * d, bias=False) for _ in range(n))
        self.down = nn.ModuleList(nn.Linear(2 * d, d, bias=False) for _ in range(n))
        self.d = d


def decode(stack, planner, x):
    for i, (u, v) in enumerate(zip(stack.up, stack.down)):
        level = planner.confidence(x)
        gain = planner.plan(i, level)
        x = x + gain * v(F.silu(u(F.layer_norm(x, (stack.d,)))))
    return x


def main():
    opts = stage.options()
    s = opts.smoke
    d, n, rows = (32, 4, 8) if s else (2048, 40, 4096)
    dt = torch.float32 if s else torch.bfloat16
    with torch.device(opts.device):
        stack = Stack(d, n).to(dt)
    planner = Planner(n)
    x = torch.randn(rows, d, device=opts.device, dtype=dt)
    tail = []

    @torch.inference_mode()
    def step():
        out = decode(stack, planner, x)
        tail[:] = out[:, 0].float().topk(4).indices.tolist()

    stage.conduct(opts, step, [
        stage.Factor("synchronization", "Planner.confidence", "decode", planner.probe.set, 0.2, 1.0),
    ], "light")


if __name__ == "__main__":
    main()
