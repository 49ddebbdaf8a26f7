# SPDX-License-Identifier: Apache-2.0
"""Self-play for a board game: a small tree per move, positions valued on the device."""
import stage
import gc
import random
import threading
import time

import torch
import torch.nn.functional as F
from torch import nn


class Node:
    __slots__ = ("parent", "kids", "visits", "worth")

    def __init__(self, parent=None):
        self.parent, self.kids, self.visits, self.worth = parent, [], 0, 0.0

    def grow(self, count):
        self.kids = [Node(self) for _ in range(count)]
        return self.kids

    def best(self):
        return max(self.kids, key=lambda k: k.worth / (1 + k.visits))


class Valuer(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.stem = nn.Conv2d(8, width, 3, padding=1)
        self.tower = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = self.stem(x)
        for conv in self.tower:
            x = F.relu(x + conv(x))
        return torch.tanh(self.head(x.mean((2, 3))))


class SelfPlay:
    def __init__(self, args):
        tiny, self.dev = args.smoke, args.device
        self.kind = torch.float32 if tiny else torch.bfloat16
        self.net = Valuer(16 if tiny else 256, 2 if tiny else 16).to(self.dev, self.kind)
        self.boards = torch.randn(8 if tiny else 512, 8, 19, 19).to(self.dev, self.kind)
        if not tiny:
            self.net = self.net.to(memory_format=torch.channels_last)
            self.boards = self.boards.contiguous(memory_format=torch.channels_last)
        self.rng = random.Random(args.seed)
        self.book = None
        self.size = stage.Dial(20000, hi=3e6, listen=self.open_book)
        self.root = Node()

    def open_book(self, size):
        if size and (self.book is None or len(self.book) != int(self.size.value) // 4 * 4):
            self.book = []
            for _ in range(int(size) // 4):
                head = Node()
                self.book += [head, *head.grow(3)]

    def search(self, values):
        leaf = self.root
        for value in values:
            for kid in leaf.grow(4):
                kid.worth = value + self.rng.random()
            leaf = leaf.best()
            back = leaf
            while back is not None:
                back.visits += 1
                back = back.parent

    def turn_over(self):
        """The tree of the last move goes; its links run both ways."""
        self.root = Node()
        if self.size.live:
            gc.collect()

    def play(self):
        values = self.net(self.boards).float().flatten()[:24].cpu().tolist()
        self.search(values)
        self.turn_over()


def sleeper(cond):
    with cond:
        while True:
            cond.wait(0.5)


@torch.no_grad()
def main():
    args = stage.arguments()
    torch.manual_seed(args.seed)
    game = SelfPlay(args)
    threading.Thread(target=sleeper, args=(threading.Condition(),), name="gil-holder", daemon=True).start()
    threading.Thread(target=time.sleep, args=(1e6,), name="remote-eval", daemon=True).start()
    game.play()
    gc.collect()
    gc.freeze()
    stage.conduct(args, game.play, [game.size])


if __name__ == "__main__":
    main()
