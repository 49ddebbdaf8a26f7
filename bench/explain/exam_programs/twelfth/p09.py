# SPDX-License-Identifier: Apache-2.0
"""Message passing over a typed graph; every relation has its own small map."""
import stage
import hashlib
import threading
import time

import torch
from torch import nn


class RelationMixer(nn.Module):
    """Relations that were edited lately are not in the stacked tensor yet."""

    def __init__(self, relations, dim, edited):
        super().__init__()
        self.maps = nn.Parameter(torch.randn(relations, dim, dim) / dim ** 0.5, requires_grad=False)
        self.edited = edited

    def _one(self, message, weight):
        return torch.relu(message @ weight).mul_(0.5).add_(message)

    def forward(self, messages):
        out = torch.relu(torch.bmm(messages, self.maps)).mul_(0.5).add_(messages)
        for r in range(int(self.edited())):
            k = r % len(messages)
            out[k] = self._one(messages[k], self.maps[k])
        return out


class Encoder(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))

    def forward(self, x):
        for lin in self.body:
            x = x + 0.1 * torch.relu(lin(x))
        return x


class GraphNet:
    def __init__(self, args):
        tiny, dev = args.smoke, args.device
        kind = torch.float32 if tiny else torch.bfloat16
        nodes, dim, depth = (256, 64, 3) if tiny else (16384, 4096, 9)
        self.relations, self.width, self.rows = (32, 16, 8) if tiny else (512, 32, 64)
        self.edited = stage.Dial(20 if tiny else 400)
        self.encoder = Encoder(dim, depth).to(dev, kind)
        self.mixer = RelationMixer(self.relations, self.width, self.edited).to(dev, kind)
        self.x = torch.randn(nodes, dim, device=dev, dtype=kind)
        self.need = self.relations * self.rows * self.width

    def step(self):
        h = self.encoder(self.x)
        first = h.flatten()[: self.need] if h.numel() >= self.need else h.flatten().repeat(2)[: self.need]
        mixed = self.mixer(first.view(self.relations, self.rows, self.width))
        return mixed.float().square().mean().item()


def checksums(page, tiny):
    """Verifies the loaded shards in the background."""
    while True:
        hashlib.sha256(page).digest()
        time.sleep(0.2 if tiny else 0.004)


@torch.no_grad()
def main():
    args = stage.arguments()
    torch.manual_seed(args.seed)
    net = GraphNet(args)
    page = bytes(1 << 20 if args.smoke else 1 << 24)
    threading.Thread(target=checksums, args=(page, args.smoke), name="busy-spin", daemon=True).start()
    stage.conduct(args, net.step, [net.edited])


if __name__ == "__main__":
    main()
