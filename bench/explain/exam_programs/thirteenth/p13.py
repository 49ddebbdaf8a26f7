# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a dense-labelling network: logits per pixel, a confusion table, class scores for the report."""
from stage import Dial, arguments, conduct

import torch
import torch.nn as nn


def network(width, depth, classes):
    layers = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU(inplace=True)]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(width, classes, 1))


class Scoreboard:
    def __init__(self, classes, device, amount):
        self.classes, self.amount = classes, amount
        self.table = torch.zeros(classes, classes, dtype=torch.long, device=device)
        self.cells = {}

    def include(self, guess, truth):
        pairs = (truth * self.classes + guess).flatten()
        fresh = torch.zeros_like(self.table).view(-1)
        fresh.scatter_add_(0, pairs, torch.ones_like(pairs))
        self.table += fresh.view_as(self.table)

    def allocate(self):
        flat = self.table.view(-1)
        for k in range(min(self.amount(), flat.numel())):
            self.cells[k] = flat[k].item()


def evaluate(net, images, truths, board):
    """Endless walk over the held-out set."""
    k = 0
    while True:
        with torch.no_grad():
            guess = net(images[k]).argmax(1)
            board.include(guess, truths[k])
            board.allocate()
        k = (k + 1) % len(images)
        yield k


def main():
    args = arguments()
    torch.manual_seed(args.seed)
    batch, side, width, depth, classes = (1, 32, 8, 2, 8) if args.smoke else (16, 320, 96, 7, 64)
    net = network(width, depth, classes).to(args.device).eval()
    images = [torch.randn(batch, 3, side, side, device=args.device) for _ in range(3)]
    truths = [torch.randint(classes, (batch, side, side), device=args.device) for _ in range(3)]
    dial = Dial(10 if args.smoke else 120, hi=classes ** 2, whole=True)
    walk = evaluate(net, images, truths, Scoreboard(classes, args.device, dial))
    conduct(args, walk.__next__, [dial])


if __name__ == "__main__":
    main()
