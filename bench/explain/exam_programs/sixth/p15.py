# SPDX-License-Identifier: Apache-2.0
"""Condition monitoring of turbines: two change detectors (CUSUM) over long vibration records, on two streams."""
import contextlib
import torch
import exam_kit as kit

job = kit.Job("p15")
CHANNELS = job.size([8, 12, 16, 24], 2)
LENGTH = job.size([300_000, 400_000], 400)
ROUNDS = job.size([5, 6, 8], 2)


class Detector:
    """Cumulative drift of each channel against its running reference."""

    def __init__(self, dev):
        self.record = torch.randn(CHANNELS * LENGTH, device=dev)
        self.level = torch.zeros(CHANNELS, device=dev)

    def scan(self, length):
        rec = self.record[:CHANNELS * length].view(CHANNELS, length)
        drift = torch.cumsum(rec, 1)
        self.level.mul_(0.9).add_(drift[:, -1], alpha=0.1)
        return drift


class TurbineWatch:
    def __init__(self):
        self.slow, self.fast = Detector(job.dev), Detector(job.dev)
        self.side = torch.cuda.Stream() if job.cuda else None
        self.length = LENGTH // 4
        self.ordered = False
        self.alarm = torch.zeros(CHANNELS, device=job.dev)

    def on_side(self):
        return torch.cuda.stream(self.side) if self.side else contextlib.nullcontext()

    def alloc_hook(self):
        if self.side:
            self.side.wait_stream(torch.cuda.current_stream())

    def alloc_hook_done(self):
        if self.side:
            torch.cuda.current_stream().wait_stream(self.side)

    def gil_free_step(self):
        self.alloc_hook()
        for _ in range(ROUNDS):
            if self.ordered:
                self.alloc_hook()
            with self.on_side():
                self.fast.scan(self.length)
            if self.ordered:
                self.alloc_hook_done()
            self.slow.scan(LENGTH)
        self.alloc_hook_done()
        self.alarm = torch.maximum(self.slow.level, self.fast.level)


def main():
    w = TurbineWatch()

    def fast(n, on):
        w.length, w.ordered = int(n), on
    c = kit.Cause("stream_dependency", "TurbineWatch.alloc_hook_done", fast, job.share(0.25, 0.31), LENGTH * 0.4, 100,
                  LENGTH, paired=True)
    kit.examine(job, [c], "the two detectors are independent, but their streams wait for each other in every round "
                "(TurbineWatch.alloc_hook / alloc_hook_done, called by gil_free_step)", step=w.gil_free_step)


if __name__ == "__main__":
    main()
