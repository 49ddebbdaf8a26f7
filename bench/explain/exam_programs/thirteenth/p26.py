# SPDX-License-Identifier: Apache-2.0
"""Material surrogates: a deep stack of small residual cells, kept as traced graphs, predicts energies of large crystals."""
import gc

from stage import Dial, arguments, conduct

import torch
import torch.fx
import torch.nn as nn


class ResidualCell(nn.Module):
    def __init__(self, dim, number):
        super().__init__()
        self.first, self.second = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.scale = nn.Parameter(torch.full((dim,), 0.1))
        self.skip = number % 3 == 0

    def forward(self, x):
        h = torch.nn.functional.gelu(self.first(x))
        h = self.second(h) * self.scale
        return torch.tanh(x + h) if self.skip else x + h


class Stack:
    def __init__(self, dim, depth, device, dtype, amount):
        self.cells = [ResidualCell(dim, k).to(device, dtype).eval() for k in range(depth)]
        self.amount, self.plans = amount, {}
        for k in range(depth):
            self.send(k)

    def send(self, k):
        self.plans[k] = torch.fx.symbolic_trace(self.cells[k])

    def __call__(self, x):
        fresh = min(self.amount(), len(self.cells))
        for k in range(fresh):
            self.send(k)
        for k in range(len(self.cells)):
            x = self.plans[k](x)
        return x


def main():
    args = arguments()
    torch.manual_seed(args.seed)
    atoms, dim, depth = (128, 16, 24) if args.smoke else (16384, 1024, 96)
    dtype = torch.float32 if args.smoke else torch.bfloat16
    dial = Dial(2 if args.smoke else 12, hi=depth, whole=True)
    stack = Stack(dim, depth, args.device, dtype, dial)
    crystal = torch.randn(atoms, dim, device=args.device, dtype=dtype)
    energies = []
    gc.collect()
    gc.freeze()

    @torch.inference_mode()
    def predict():
        energies.append(stack(crystal).float().square().mean().item())
        del energies[:-50]

    conduct(args, predict, [dial])


if __name__ == "__main__":
    main()
