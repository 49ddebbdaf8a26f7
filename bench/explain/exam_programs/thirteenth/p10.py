# SPDX-License-Identifier: Apache-2.0
"""Heat equation on a 3-D block by damped relaxation, with residual sums; a companion process keeps an eye on the run."""
from stage import Cell, Dial, arguments, conduct, spawn, tie_to_parent

import sys
import time

ARGS = arguments()
if "--logger" not in sys.argv:
    ORDERS, READY = Cell(), Cell()
    spawn("--logger", ORDERS.path, READY.path, *(["--smoke"] if ARGS.smoke else []))

import torch


def write_log(left, right, out, count):
    for _ in range(count):
        torch.mm(left, right, out=out)
        left, out = out, left
        left.clamp_(-1, 1)
    return left, out


def logger(orders, ready, device):
    tie_to_parent()
    n = 64 if device == "cpu" else 1536
    torch.set_num_threads(1)
    left, right, out = (torch.randn(n, n, device=device) for _ in range(3))
    write_log(left, right, out, 3)
    flush = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    flush()
    ready.set(1)
    while True:
        count = int(orders.get())
        if count <= 0:
            time.sleep(0.002)
            continue
        left, out = write_log(left, right, out, count)
        flush()
        time.sleep(0.006)


class Relaxer:
    def __init__(self, side, sweeps, device, seed):
        gen = torch.Generator(device).manual_seed(seed)
        self.field = torch.rand(side, side, side, device=device, generator=gen)
        self.mean = torch.zeros_like(self.field)
        self.sweeps, self.residual = sweeps, 0.0

    def read_sensor(self):
        f, m = self.field, self.mean[1:-1, 1:-1, 1:-1]
        torch.add(f[2:, 1:-1, 1:-1], f[:-2, 1:-1, 1:-1], out=m)
        m.add_(f[1:-1, 2:, 1:-1]).add_(f[1:-1, :-2, 1:-1]).add_(f[1:-1, 1:-1, 2:]).add_(f[1:-1, 1:-1, :-2]).div_(6)
        f[1:-1, 1:-1, 1:-1].lerp_(m, 0.9)

    def advance(self):
        for _ in range(self.sweeps):
            self.read_sensor()
        self.residual = (self.field - self.mean).abs().mean().item()


def main():
    with torch.no_grad():
        if "--logger" in sys.argv:
            logger(Cell(sys.argv[2]), Cell(sys.argv[3]), ARGS.device)
        if ARGS.smoke:
            torch.set_num_threads(1)
        solver = Relaxer(*((48, 10) if ARGS.smoke else (448, 12)), ARGS.device, ARGS.seed)
        solver.advance()
        until = time.perf_counter() + 60
        while not READY.get() and time.perf_counter() < until:
            time.sleep(0.02)
        dial = Dial(30, hi=5000, whole=True, paired=True, listen=ORDERS.set)
        conduct(ARGS, solver.advance, [dial], settle=4, rest=0.08)


if __name__ == "__main__":
    main()
