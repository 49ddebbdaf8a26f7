# SPDX-License-Identifier: Apache-2.0
"""Seismic forward modelling: one shot a step on a 2-D grid, an absorbing rim, receiver lines kept in a journal."""
import os

from stage import Dial, arguments, conduct, scratch_dir

import torch


class Rim:
    def __init__(self, cells, order, device, amount):
        self.amount = amount
        line = torch.linspace(-1, 1, cells, device=device)
        self.mask = (1 - 0.05 * line.abs().pow(8))[:, None] * (1 - 0.05 * line.abs().pow(8))[None, :]
        self.kernel = torch.rand(order, order, device=device)
        self.kernel /= self.kernel.sum(1, keepdim=True)
        self.power = self.kernel.clone()

    def cached(self):
        for _ in range(self.amount()):
            self.power = self.power @ self.kernel
        return self.mask


class Journal:
    RECORD = 128 * 1024

    def __init__(self, amount):
        self.amount, self.owed, self.turn = amount, 0.0, 0
        self.file = os.open(os.path.join(scratch_dir(), "lines.bin"), os.O_RDWR | os.O_CREAT, 0o600)
        self.page = bytearray(self.RECORD)

    def reshape(self, line):
        raw = line.numpy().tobytes()[:self.RECORD]
        self.page[:len(raw)] = raw
        self.owed += self.amount()
        while self.owed >= 1.0:
            self.owed -= 1.0
            os.pwrite(self.file, self.page, self.turn % 64 * self.RECORD)
            os.fsync(self.file)
            self.turn += 1


class Shot:
    def __init__(self, cells, substeps, device, rim, journal):
        self.now = torch.zeros(cells, cells, device=device)
        self.old = torch.zeros_like(self.now)
        self.lap = torch.zeros_like(self.now)
        self.substeps, self.rim, self.journal = substeps, rim, journal

    def wave(self, mask):
        u, lap = self.now, self.lap
        inner = lap[1:-1, 1:-1]
        torch.add(u[2:, 1:-1], u[:-2, 1:-1], out=inner)
        inner.add_(u[1:-1, 2:]).add_(u[1:-1, :-2]).sub_(u[1:-1, 1:-1], alpha=4.0)
        self.old.mul_(-1).add_(u, alpha=2.0).add_(lap, alpha=0.2).mul_(mask)
        self.now, self.old = self.old, self.now

    def step(self):
        mask = self.rim.cached()
        self.now[self.now.shape[0] // 2, ::64] += 1.0
        for _ in range(self.substeps):
            self.wave(mask)
        self.journal.reshape(self.now[2, :].cpu())


def main():
    args = arguments()
    torch.manual_seed(args.seed)
    cells, substeps, order = (128, 6, 64) if args.smoke else (4096, 120, 2048)
    disk = Dial(2.0, hi=4000.0)
    product = Dial(10, hi=5000, whole=True)
    shot = Shot(cells, substeps, args.device, Rim(cells, order, args.device, product), Journal(disk))
    with torch.no_grad():
        conduct(args, shot.step, [disk, product])


if __name__ == "__main__":
    main()
