# SPDX-License-Identifier: Apache-2.0
"""Video stabiliser: correlation volumes of frame pairs, camera drift integrated beside them on its own stream."""
from contextlib import nullcontext

from stage import Dial, arguments, conduct

import torch


class Stabiliser:
    def __init__(self, device, points, features, seed):
        gen = torch.Generator(device).manual_seed(seed)
        self.gpu = device == "cuda"
        self.left = torch.randn(points, features, device=device, generator=gen)
        self.right = torch.randn(features, points, device=device, generator=gen)
        self.volume = torch.empty(points, points, device=device)
        self.flow = torch.zeros(points, device=device)
        self.side = torch.cuda.Stream(priority=-1) if self.gpu else None
        self.done = torch.cuda.Event() if self.gpu else None
        self.amount = None
        self.rows = self.measure() if self.gpu else 60_000
        self.speed = torch.randn(self.rows, 64, device=device, generator=gen) * 1e-3
        self.path = torch.empty_like(self.speed)

    def measure(self):
        """How many drift samples fit beside the correlation of one pair."""
        probe = torch.ones(8192, 64, device="cuda")
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        for _ in range(3):
            marks[0].record()
            self.correlate()
            marks[1].record()
            torch.cumsum(probe, 0)
            marks[2].record()
            torch.cuda.synchronize()
        row = marks[1].elapsed_time(marks[2]) / 8192
        return max(2048, min(4_000_000, int(0.62 * marks[0].elapsed_time(marks[1]) / row)))

    def correlate(self):
        for shift in range(4):
            torch.mm(self.left, self.right, out=self.volume)
            self.volume.mul_(1.0 / (1 + shift))
            self.flow += self.volume.amax(1) * 1e-3

    def upload_frame(self, split):
        if split:
            torch.cumsum(self.speed[:split], 0, out=self.path[:split])
            if self.gpu:
                self.done.record()
        if self.gpu and split < self.rows:
            torch.cumsum(self.speed[split:], 0, out=self.path[split:])

    def encode(self, split):
        if split and self.gpu:
            torch.cuda.current_stream().wait_event(self.done)
        self.correlate()

    def step(self):
        split = min(self.amount(), self.rows)
        if self.gpu:
            main = torch.cuda.current_stream()
            self.side.wait_stream(main)
        with torch.cuda.stream(self.side) if self.gpu else nullcontext():
            self.upload_frame(split)
        self.encode(split)
        if self.gpu:
            main.wait_stream(self.side)
        self.flow.add_(self.path[-1, 0])


def main():
    args = arguments()
    size = (256, 64) if args.smoke else (8192, 1024)
    with torch.no_grad():
        work = Stabiliser(args.device, *size, args.seed)
        work.path.zero_()
        work.amount = Dial(max(1, work.rows // 3), hi=work.rows, whole=True)
        conduct(args, work.step, [work.amount])


if __name__ == "__main__":
    main()
