# SPDX-License-Identifier: Apache-2.0
"""Genome read alignment: banded score matrices of read batches against a reference window, row by row."""
from typing import NamedTuple

from stage import Dial, arguments, conduct

import torch


class Sizes(NamedTuple):
    reads: int
    window: int
    rows: int
    block: int


class Aligner:
    def __init__(self, sizes, device, seed, amount):
        gen = torch.Generator(device).manual_seed(seed)
        self.sizes, self.device, self.amount = sizes, device, amount
        self.reference = torch.randint(4, (1, sizes.window), device=device, generator=gen)
        self.reads = torch.randint(4, (sizes.reads, sizes.rows), device=device, generator=gen)
        self.row = torch.zeros(sizes.reads, sizes.window, device=device)
        self.up = torch.zeros_like(self.row)
        self.match = torch.zeros_like(self.row)
        self.hit = torch.zeros(sizes.reads, sizes.window, dtype=torch.bool, device=device)
        self.top = torch.zeros(sizes.reads, device=device)
        self.where = torch.zeros(sizes.reads, dtype=torch.long, device=device)

    def score(self, r):
        torch.eq(self.reads[:, r:r + 1], self.reference, out=self.hit)
        self.match.copy_(self.hit).mul_(3.0).sub_(1.0)
        self.match[:, 1:].add_(self.row[:, :-1])
        torch.sub(self.row, 2.0, out=self.up)
        torch.maximum(self.match, self.up, out=self.row)
        self.row.clamp_(min=0.0)

    def sort_results(self):
        """Room for the traceback of this batch."""
        count = self.amount()
        if not count:
            return 0
        rooms = [torch.empty(self.sizes.block, dtype=torch.uint8, device=self.device) for _ in range(count)]
        rooms[0][:1024].zero_()
        held = sum(room.numel() for room in rooms)
        del rooms
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return held

    def batch(self):
        self.sort_results()
        self.row.zero_()
        for r in range(self.sizes.rows):
            self.score(r)
        torch.max(self.row, 1, out=(self.top, self.where))
        return self.top[:4].tolist()


def main():
    args = arguments()
    sizes = Sizes(16, 128, 16, 1 << 12) if args.smoke else Sizes(1024, 32768, 32, 40 << 20)
    dial = Dial(40 if args.smoke else 12, hi=4000 if args.smoke else 250, whole=True)
    with torch.no_grad():
        aligner = Aligner(sizes, args.device, args.seed, dial)
        conduct(args, aligner.batch, [dial])


if __name__ == "__main__":
    main()
