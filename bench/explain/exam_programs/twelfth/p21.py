# SPDX-License-Identifier: Apache-2.0
"""Relaxation of many coupled fields towards a fixed point."""
import stage
import threading
import time

import torch


class Relaxer:
    def __init__(self, args):
        tiny, dev = args.smoke, args.device
        size, self.fields, self.turns = (64, 8, 6) if tiny else (4096, 2048, 40)
        kind = torch.float32 if tiny else torch.bfloat16
        self.op = (torch.randn(size, size, device=dev) * (0.4 / size ** 0.5)).to(kind)
        self.x = torch.zeros(size, self.fields, device=dev, dtype=kind)
        self.load = torch.randn(size, self.fields, device=dev).to(kind)
        self.looks = stage.Dial(20 if tiny else 150)
        self.done = 0
        self.worst = 0.0

    def inspect(self, peaks, count, tol=1e-9):
        """Fields that have settled are counted."""
        for k in range(count):
            peak = peaks[k % self.fields]
            if float(peak) < tol:
                self.done += 1

    def solve(self):
        self.x.mul_(0.1)
        owed, looks = 0.0, self.looks() / self.turns
        for _ in range(self.turns):
            fresh = torch.addmm(self.load, self.op, self.x)
            peaks = (fresh - self.x).abs_().amax(0)
            self.x = torch.lerp(self.x, fresh, 0.7)
            owed += looks
            self.inspect(peaks, int(owed))
            owed -= int(owed)
        self.worst = peaks.amax().item()


class Watch(threading.Thread):
    def __init__(self, relaxer):
        super().__init__(name="alloc-trim", daemon=True)
        self.relaxer = relaxer

    def run(self):
        high = 0.0
        while True:
            high = max(high, self.relaxer.worst)
            time.sleep(0.02)


def main():
    args = stage.arguments()
    torch.manual_seed(args.seed)
    with torch.inference_mode():
        relaxer = Relaxer(args)
        Watch(relaxer).start()
        stage.conduct(args, relaxer.solve, [relaxer.looks])


if __name__ == "__main__":
    main()
