# SPDX-License-Identifier: Apache-2.0
"""A mixture of many small experts trained with a shadow copy of the weights."""
import stage
import torch
from torch import nn
from torch.nn import functional as F


class ShadowWeights:
    def __init__(self, params, decay=0.999):
        self.src = [p.detach() for p in params]
        self.dst = [p.clone() for p in self.src]
        self.decay = decay
        self.single = 0

    @torch.no_grad()
    def track(self):
        n = self.single
        for s, d in zip(self.src[:n], self.dst[:n]):
            d.mul_(self.decay).add_(s, alpha=1.0 - self.decay)
        if n < len(self.dst):
            torch._foreach_lerp_(self.dst[n:], self.src[n:], 1.0 - self.decay)


class Experts(nn.Module):
    def __init__(self, count, d):
        super().__init__()
        self.gain = nn.ParameterList(nn.Parameter(torch.ones(d)) for _ in range(count))
        self.w = nn.Parameter(torch.randn(count, d, d) * d ** -0.5)

    def forward(self, x):
        g = torch.stack(tuple(self.gain)).unsqueeze(1)
        return F.silu(torch.bmm(x * g, self.w))


def build(opts):
    s = opts.smoke
    count, d, rows = (8, 16, 8) if s else (64, 1024, 256)
    with torch.device(opts.device):
        nets = nn.ModuleList(Experts(count, d) for _ in range(3))
    x = torch.randn(count, rows, d, device=opts.device)
    adam = torch.optim.AdamW(nets.parameters(), 1e-4, fused=not s)
    cut = 4 if s else 16
    pieces = [v for n in nets for v in n.w.detach().view(count * cut, d // cut, d).unbind(0)]
    shadow = ShadowWeights(list(p for n in nets for p in n.gain) + pieces)

    def train():
        h = x
        for n in nets:
            h = h + n(h)
        loss = h.square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        shadow.track()
        return loss.item()

    return train, shadow


def main():
    opts = stage.options()
    train, shadow = build(opts)

    def dial(x):
        shadow.single = int(x)

    stage.conduct(opts, train, [
        stage.Factor("launch_overhead", "ShadowWeights.track", "", dial, 150.0, len(shadow.dst)),
    ], "heavy")


if __name__ == "__main__":
    main()
